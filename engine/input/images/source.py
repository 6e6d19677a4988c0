"""MediaReader: reads the bytes of an image from a data: URL, or from the web if its domain is allowed."""

from __future__ import annotations

import asyncio
import base64
import binascii
import importlib
import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

from engine.input.images.decode import MAX_BYTES, refuse

Source = str | bytes | Image.Image
TIMEOUT_S = 10.0
_PART_CHARS = 2**18  # of base64, a multiple of 4
_NAT64 = ipaddress.ip_network("64:ff9b::/32")  # gateways to IPv4
_DATA_URL = re.compile(r"data:(image/[a-z+.-]+)?(;[a-z-]+=[^;,]*)*;base64,", re.IGNORECASE)
_TYPES = ("image_url", "input_image", "image", "image_pil")


def is_image(part: object) -> bool:
    """Whether a content part is an image of a client, in the form of OpenAI, Anthropic or vLLM."""
    return isinstance(part, Mapping) and part.get("type") in _TYPES


def read_source(where: str, part: Mapping[str, object]) -> Source:
    """Return the image of a content part: a URL, the bytes of a file, or a PIL image.

    Raises:
        InvalidRequest: the part has another form.
    """
    kind = part.get("type")
    found = part.get({"image_pil": "image_pil", "image": "image"}.get(str(kind), "image_url"))
    source = part.get("source")
    if kind == "image" and isinstance(source, Mapping):
        if source.get("type") == "base64" and isinstance(source.get("data"), str):
            return decode_base64(str(source["data"]))
        found = source.get("url") if source.get("type") == "url" else None
    if isinstance(found, Mapping):
        found = found.get("url")
    if isinstance(found, str | bytes | Image.Image):
        return found
    raise refuse(f"{where} must have an image: a data: URL, base64 data, or a PIL image in Python")


def decode_base64(text: str) -> bytes:
    """Raises InvalidRequest if the text is not base64, or too long."""
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise refuse(f"an image file may have at most {MAX_BYTES} bytes")
    try:
        # In parts, so that other threads get the interpreter in between.
        parts = (text[start : start + _PART_CHARS] for start in range(0, len(text), _PART_CHARS))
        return b"".join(base64.b64decode(part, validate=True) for part in parts)
    except (binascii.Error, ValueError) as error:
        raise refuse(f"the image is not valid base64: {error}") from error


class MediaReader:
    """Reads images. Addresses are resolved once; private ones and redirects are refused.

    Args:
        is_public: whether an address may be connected to; default: `is_public_address`.
    """

    def __init__(
        self, allowed_domains: Sequence[str] = (), is_public: Callable[[str], bool] | None = None,
    ) -> None:
        self._allowed_domains = frozenset(domain.lower().rstrip(".") for domain in allowed_domains)
        self._is_public = is_public or is_public_address

    async def read(self, source: str | bytes) -> bytes:
        """Return the content of an image file.

        Raises:
            InvalidRequest: the URL is not allowed, or it cannot be read.
        """
        if isinstance(source, bytes):
            return source
        if (found := _DATA_URL.match(source)) is not None:
            return await asyncio.to_thread(decode_base64, source[found.end() :])
        try:
            parts = urlsplit(source)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise refuse(f"the image's URL is not valid: {error}") from error
        if parts.scheme.lower() not in ("http", "https") or not host:
            raise refuse(f"an image must be a data: URL with base64, not {source[:40]!r}")
        if host not in self._allowed_domains or parts.username is not None:
            allowed = ", ".join(sorted(self._allowed_domains)) or "none"
            raise refuse(f"images of {host[:80]!r} may not be fetched; allowed_media_domains: {allowed}")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                address = await self._resolve(host, port or (443 if parts.scheme.lower() == "https" else 80))
                # by name, because the import of an HTTP client would delay every start
                download: Any = importlib.import_module("engine.input.images.download")
                data: bytes = await download.fetch(source, *address)
                return data
        except (TimeoutError, OSError, ValueError) as error:
            raise refuse(
                f"the image at {host!r} cannot be fetched: {str(error)[:200] or 'timeout'}"
            ) from error

    async def _resolve(self, host: str, port: int) -> tuple[str, int]:
        """Return the address of a host, and its family."""
        loop = asyncio.get_running_loop()
        family, _, _, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        if not self._is_public(str(address[0])):
            raise refuse(f"images of {host!r} may not be fetched: its address is private")
        return str(address[0]), family


def is_public_address(address: str) -> bool:
    """Whether an address belongs to the public internet, and contains no other address to which it is forwarded."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = (found.ipv4_mapped, found.sixtofour, found.teredo)
        if any(each is not None for each in inner) or found in _NAT64:
            return False
    return found.is_global and not found.is_multicast
