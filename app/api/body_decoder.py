"""BodyDecoder: decompresses the body of a request in pieces of bounded size."""

from __future__ import annotations

import zlib

from app.api.errors import ApiError, BadRequest

# Content-Encoding -> zlib's window bits: of gzip, and of zlib's own format, which HTTP calls deflate
WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
PIECE_BYTES = 2**18


class BodyDecoder:
    """Decodes one body.

    Args:
        encoding: the value of Content-Encoding.

    Raises ApiError: 415, the encoding is not supported.
    """

    def __init__(self, encoding: str) -> None:
        self.encoding = encoding.strip().lower()
        if self.encoding not in WINDOW_BITS:
            message = f"Content-Encoding {encoding[:80]!r} is not supported; send gzip, deflate or none"
            accepted = {"Accept-Encoding": "gzip, deflate"}
            raise ApiError(415, message, code="unsupported_encoding", headers=accepted)
        self._bits = WINDOW_BITS[self.encoding]
        self._inflater: zlib._Decompress | None = None
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take in compressed bytes; the ones before have been read."""
        if self._inflater is None and data:
            # Some clients send deflate without zlib's header, whose first byte names the method 8.
            is_raw = self._bits == 15 and data[0] & 15 != 8
            self._inflater = zlib.decompressobj(-15 if is_raw else self._bits)
        self._rest = data

    def read(self) -> bytes:
        """Return the next piece; empty if more compressed bytes are needed, or at the end."""
        if self._inflater is None:
            return b""
        try:
            piece = self._inflater.decompress(self._rest, PIECE_BYTES)
        except zlib.error as error:
            raise self._malformed(str(error)) from None
        self._rest = self._inflater.unconsumed_tail
        if self._inflater.unused_data:
            raise self._malformed("data follows its end")
        return piece

    def close(self) -> None:
        """Check that the body is complete."""
        if self._inflater is not None and not self._inflater.eof:
            raise self._malformed("its end is missing")

    def _malformed(self, reason: str) -> ApiError:
        return BadRequest(f"the body is not valid {self.encoding}: {reason}", None, "invalid_encoding")
