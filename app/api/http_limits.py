"""BoundedHttp: uvicorn's HTTP parser with limits for the size and the time of a request's headers."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
# Within it a head has to be there, and a body to move on; between two requests uvicorn's own limit counts.
READ_TIMEOUT_S = 60.0


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 if the headers are too large, and closes a connection whose request stays incomplete."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._num_head_bytes = 0
        self._is_in_body = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self._stop_timer()
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        """Count the bytes that arrive before a request's headers are complete."""
        if self._is_in_body or self._timer is None:
            self._start_timer()
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
        self._stop_timer()
        super().on_message_complete()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(READ_TIMEOUT_S, self._hang_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        # it is we who do not read, or a request is being answered and this is the beginning of the next
        if self.flow.read_paused or (not self._is_in_body and self._is_answering):
            self._start_timer()
        else:
            self.transport.close()
