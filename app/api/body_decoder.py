"""BodyDecoder: decompresses the body of a request in pieces of bounded size."""

from __future__ import annotations

import zlib

from app.api.errors import ApiError, BadRequest

# Content-Encoding -> zlib's window bits: of gzip, and of zlib's own format, which HTTP calls deflate
WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
PIECE_BYTES = 2**18
MAX_MEMBERS = 2048  # of a gzip body: each takes some time, however little it holds


def make_decoder(encoding: str) -> BodyDecoder | None:
    """Return the decoder for a value of Content-Encoding; None if the body is plain.

    Raises ApiError: 415, the encoding is not supported.
    """
    codings = [each for each in map(str.strip, encoding.split(",")) if each.lower() not in ("", "identity")]
    return BodyDecoder(", ".join(codings)) if codings else None


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
        self._num_members = 0

    def feed(self, data: bytes) -> None:
        """Take in compressed bytes; the ones before have been read."""
        if self._inflater is None and data and self._bits == 15 and data[0] & 15 != 8:
            self._bits = -15  # some clients send deflate without zlib's header, whose first byte names the method 8
        self._rest = data

    def read(self) -> bytes:
        """Return the next piece; empty if more compressed bytes are needed, or at the end."""
        piece = b""
        while not piece and (self._rest or (self._inflater is not None and not self._inflater.eof)):
            if self._inflater is None or self._inflater.eof:
                self._begin_member()
            assert self._inflater is not None, "a member was begun"
            try:
                piece = self._inflater.decompress(self._rest, PIECE_BYTES)
            except zlib.error as error:
                raise self._malformed(str(error)) from None
            self._rest = self._inflater.unconsumed_tail or self._inflater.unused_data
            if not piece and not self._inflater.eof:
                break
        return piece

    def _begin_member(self) -> None:
        """Begin the body, or the next member of a gzip body, which may have several."""
        if self._num_members and self._bits != 31:
            raise self._malformed("data follows its end")
        if self._num_members == MAX_MEMBERS:
            raise self._malformed(f"it has more than {MAX_MEMBERS:,} members")
        self._num_members += 1
        self._inflater = zlib.decompressobj(self._bits)

    def close(self) -> None:
        """Check that the body is complete."""
        if self._inflater is not None and not self._inflater.eof:
            raise self._malformed("its end is missing")

    def _malformed(self, reason: str) -> ApiError:
        return BadRequest(f"the body is not valid {self.encoding}: {reason}", None, "invalid_encoding")
