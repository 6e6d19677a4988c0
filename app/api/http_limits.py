"""BoundedHttp: uvicorn's HTTP parser with limits, without upgrades, with streams for HTTP/1.0 and early answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEADERS_BYTES = 64 * 1024
# Seconds to receive the headers, and between parts of the body; between two requests uvicorn's own limit counts.
READ_TIMEOUT_S = 60.0
# Seconds in which the rest of a body may arrive whose request was answered early and asks to close the connection.
LINGER_S = 30.0


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 if the headers are too large, and closes a connection whose request stays incomplete.

    It ignores Upgrade headers, as HTTP allows: no route here takes a WebSocket, and HTTP/2 without TLS (h2c, which
    Java's client asks for) is not served. HTTP/1.0, which knows no chunks, gets a stream that ends with its connection.
    A request that is refused before its body was read gets its answer at once, and the connection closes later.
    """

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

    def data_received(self, data: bytes) -> None:
        """Count the bytes that arrive before a request's headers are complete."""
        if self._is_in_body or self._timer is None:
            self._start_timer()
        if not self._is_in_body:
            self._num_head_bytes += len(data)
        self._parse(data)
        if not self._is_in_body and self._num_head_bytes > MAX_HEADERS_BYTES:
            self.send_400_response(f"The request headers are larger than {MAX_HEADERS_BYTES} bytes.")

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            # The parser stops behind the headers. A new one reads them again without the upgrade, then the rest.
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if method == b"CONNECT":
                self.send_400_response("CONNECT is for proxies.")
                return
            head = [method, b" ", self.url, b" HTTP/", version, b"\r\n"]
            for name, value in self.headers:
                head += [name, b": ", value, b"\r\n"] if name != b"upgrade" else []
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self._parse(b"".join([*head, b"\r\n", data[error.args[0] :]]))
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_in_body = False
        self._num_head_bytes = 0
        self._stop_timer()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        send = closing_late(cycle)
        if cycle.scope["http_version"] == "1.0":
            send = without_chunks(cycle, send)

        async def call(scope: Scope, receive: Receive, _: Send) -> None:
            await app(scope, receive, send)

        super()._start_asgi_task(cycle, call)  # type: ignore[arg-type]

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


def without_chunks(cycle: RequestResponseCycle, send: Send) -> Send:
    """Write answers of unknown length as they are, for a client of HTTP/1.0."""
    is_open = False

    async def send_plain(message: Message) -> None:
        nonlocal is_open
        if message["type"] == "http.response.start":
            is_open = all(name.lower() != b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = False if is_open else None
        elif is_open:
            # uvicorn compares this length with what is sent
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain


def closing_late(cycle: RequestResponseCycle) -> Send:
    """Answer at once, and end the answer, which closes the connection, when the request's body has arrived.

    A socket that is closed with unread data resets the connection, and the client loses the answer.
    """

    async def send(message: Any) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_last and cycle.more_body and not cycle.keep_alive:
            await cycle.send(message | {"more_body": True})
            message = {"type": "http.response.body"}
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while cycle.more_body and (await cycle.receive())["type"] == "http.request":
                        pass
        await cycle.send(message)

    return send
