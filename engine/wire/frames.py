"""Link and Channel: send and receive messages over a byte stream to another process, in a task or in a thread.

A frame is the length of the body (uint32, little endian), the code of the message's type (uint8), and the body, which
`codec.py` encodes. Reader and writer must have the same PROTOCOL_VERSION, because codes are positions in MESSAGE_TYPES.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.wire.codec import decode, encode
from engine.wire.link_messages import MESSAGE_TYPES

MAX_FRAME_BYTES = 2**28
_HEADER = struct.Struct("<IB")
HEADER_BYTES = _HEADER.size
_CODES: dict[type, int] = {kind: code for code, kind in enumerate(MESSAGE_TYPES)}


class FrameError(ConnectionError):
    """The peer sent bytes that are not a frame."""


class MessageTooLarge(ValueError):
    """A message does not fit into a frame. Nothing of it was sent."""


class Link:
    """One connection. Messages sent in one turn of the event loop are written at once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[bytes] = []

    def send(self, message: Any) -> None:
        """Queue a message. It is lost without an error if the connection is; `receive` reports that.

        Raises:
            MessageTooLarge: it exceeds MAX_FRAME_BYTES.
        """
        frame = pack_frame(message)
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing += frame

    async def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> Any:
        """Return the next message.

        Raises:
            asyncio.IncompleteReadError: the peer closed the connection.
            ConnectionError: the connection was lost, or the bytes are not a frame.
        """
        length, kind = read_header(await self._reader.readexactly(HEADER_BYTES), max_bytes)
        return unpack_body(await self._reader.readexactly(length), kind)

    def close(self) -> None:
        """Write what is queued and close the connection."""
        self._flush()
        self._writer.close()

    def abort(self) -> None:
        """Close the connection without writing what is queued."""
        self._outgoing.clear()
        self._writer.transport.abort()

    def _flush(self) -> None:
        if self._outgoing and not self._writer.is_closing():
            self._writer.write(b"".join(self._outgoing))
        self._outgoing.clear()


class Channel:
    """Frames over a blocking socket. A lost or late connection, or a wrong frame, is an OSError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: Any, values: Sequence[memoryview | bytearray] = ()) -> None:
        self._connection.sendall(b"".join(pack_frame(message)))
        for value in values:
            self._connection.sendall(value)

    def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> Any:
        length, kind = read_header(bytes(self.read(HEADER_BYTES)), max_bytes)
        return unpack_body(bytes(self.read(length)), kind)

    def read(self, count: int) -> bytearray:
        value = bytearray(count)
        self.read_into(memoryview(value))
        return value

    def read_into(self, value: memoryview) -> None:
        """Fill memory with the next bytes."""
        while value:
            count = self._connection.recv_into(value)
            if not count:
                raise ConnectionError("the connection was closed")
            value = value[count:]

    def close(self) -> None:
        self._connection.close()


def pack_frame(message: Any) -> tuple[bytes, bytes]:
    """Return the two parts of a message's frame."""
    body = encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise MessageTooLarge(
            f"the request takes {len(body)} bytes with its images; at most {MAX_FRAME_BYTES} are allowed"
        )
    return _HEADER.pack(len(body), _CODES[type(message)]), body


def read_header(header: bytes, max_bytes: int) -> tuple[int, type]:
    """Return the length and the type of the body that follows."""
    length, code = _HEADER.unpack(header)
    if length > max_bytes or code >= len(MESSAGE_TYPES):
        raise FrameError(
            f"received a frame of type {code} with {length} bytes; at most {max_bytes} are allowed"
        )
    return length, MESSAGE_TYPES[code]


def unpack_body(body: bytes, kind: type) -> Any:
    """Return the message of a body."""
    try:
        return decode(body, kind)
    except msgspec.MsgspecError as error:
        raise FrameError(f"received a malformed {kind.__name__}: {error}") from error
