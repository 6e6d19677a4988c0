"""Downloads an image from an address that was checked."""

from __future__ import annotations

import socket

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from engine.input.images.decode import MAX_BYTES, refuse


async def fetch(url: str, address: str, family: int) -> bytes:
    """Return the content of a URL, whose host has this address.

    Raises:
        InvalidRequest: the server redirects or refuses, or the file is too large.
        OSError: it cannot be reached, or does not speak HTTP.
    """
    connector = aiohttp.TCPConnector(resolver=_Resolved(address, family))
    try:
        async with (
            aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise refuse(
                    f"the image's server answered with status {response.status}; redirects are not followed"
                )
            data = bytearray()
            async for part in response.content.iter_chunked(2**16):
                data += part
                if len(data) > MAX_BYTES:
                    raise refuse(f"an image file may have at most {MAX_BYTES} bytes")
            return bytes(data)
    except aiohttp.ClientError as error:
        raise OSError(str(error)) from error


class _Resolved(AbstractResolver):
    """Knows one address."""

    def __init__(self, address: str, family: int) -> None:
        self._address, self._family = address, family

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host, host=self._address, port=port, family=self._family, proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
        ]

    async def close(self) -> None:
        """There is nothing to close."""
