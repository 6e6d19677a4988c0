"""BoundedHttp: uvicorn's HTTP parser with a limit on the request line and headers, which it lacks."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 to a head that goes on and on, instead of keeping all of it in memory."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._num_head_bytes = 0
        self._is_in_body = False

    def data_received(self, data: bytes) -> None:
        """Count what arrives before a request's head is complete."""
        if not self._is_in_body:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if not self._is_in_body and self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._is_in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_body = False
        self._num_head_bytes = 0
        super().on_message_complete()
