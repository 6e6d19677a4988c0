"""Image parts that must be refused: bombs, broken and animated files, other formats, and URLs that lead elsewhere."""

import base64
import io
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from PIL import Image

from tests.engine.vision_folders import make_picture, to_bytes

PICTURE = make_picture((120, 80))
FILES = {kind: to_bytes(PICTURE, kind) for kind in ("PNG", "JPEG", "WEBP")}
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
SIDES = [
    (10_000, 10_000), (65_535, 65_535), (2**31 - 1, 2**31 - 1), (2**24 + 1, 1), (0, 5), (5, 0), (4097, 4097),
    (900, 4),
]  # fmt: skip
URLS = [
    "http://127.0.0.1/a.png", "http://localhost/a.png", "https://localhost:8443/a.png", "http://[::1]/a.png",
    "http://0.0.0.0/a.png", "http://10.0.0.1/a", "http://192.168.1.1/a", "http://172.16.0.1/a",
    "http://169.254.169.254/latest/meta-data", "http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/",
    "http://[::ffff:127.0.0.1]/a", "http://[64:ff9b::7f00:1]/", "http://[fe80::1]/", "http://[fd00::1]/",
    "http://127.1/", "http://evil.example/a.png", "http://allowed.invalid/a.png", "http://allowed.invalid.evil/",
    "http://allowed.invalid@127.0.0.1/", "http://user:key@localhost/", "http://localhost:0/",
    "http://localhost:99999/", "http://", "http:///a.png", "http://[", "//localhost/a.png", "localhost/a.png",
    "file:///etc/passwd", "file://localhost/etc/passwd", "ftp://localhost/a.png", "gopher://localhost/",
    "javascript:alert(1)", "about:blank", "/etc/passwd", "", " ", "x", "data:", "data:,x", "data:image/png,abc",
    "data:image/png;base64", "data:;base64,!!!", "data:image/png;base64,", "data:image/png;base64,AAAA",
    "data:image/png;base64,A", "data:text/html;base64,PGI+", "data:image/png;base64,%%%", "data:image/png;base64,é",
    "http://локалхост/", "http://localhost\n.evil/", "blob:x",
]  # fmt: skip
SHAPES: list[Any] = [
    {"type": "image_url"}, {"type": "image_url", "image_url": None}, {"type": "image_url", "image_url": 5},
    {"type": "image_url", "image_url": []}, {"type": "image_url", "image_url": {}}, {"type": "image"},
    {"type": "image_url", "image_url": {"url": 5}}, {"type": "image_url", "image_url": {"url": ["x"]}},
    {"type": "input_image"}, {"type": "input_image", "file_id": "f"}, {"type": "image_pil", "image_pil": "x"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "huge"}},
    {"type": "input_audio"}, {"type": "video_url", "video_url": {"url": "x"}}, {"type": ["image_url"]}, 5, None, [],
]  # fmt: skip


def list_hostile() -> Iterator[tuple[str, Any]]:
    """Yield (name, content part)."""
    for name, data in _list_files():
        yield name, make_part(data)
    for url in URLS:
        yield f"url {url}"[:60], {"type": "image_url", "image_url": {"url": url}}
    for number, shape in enumerate(SHAPES):
        yield f"shape {number}", shape


def make_part(data: bytes, kind: str = "png") -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def make_png(width: int, height: int, *chunks: tuple[bytes, bytes], pixels: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(pixels, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )


def _list_files() -> Iterator[tuple[str, bytes]]:
    for kind, data in FILES.items():
        for part in range(20):
            yield f"truncated {kind} {part}", data[: 3 + len(data) * part // 21]
    for at in range(16, 29):  # the size and form of a PNG, whose checksum is then wrong
        yield f"changed byte {at}", FILES["PNG"][:at] + bytes([FILES["PNG"][at] ^ 1]) + FILES["PNG"][at + 1 :]
    yield "png bomb", make_png(10_000, 10_000, pixels=bytes(1251 * 10_000))
    for width, height in SIDES:
        yield f"png {width}x{height}", make_png(width, height)
    for width, height in SIDES[:2] + SIDES[6:]:
        yield f"jpeg {width}x{height}", _patch_jpeg(width, height)
        for kind in (b"VP8X", b"VP8L", b"VP8 "):
            yield f"webp {kind!r} {width}x{height}", _make_webp(kind, width, height)
    zeros = zlib.compress(bytes(2**27), 9)
    yield "text bomb", make_png(8, 8, (b"zTXt", b"k\0\0" + zeros), pixels=bytes(16))
    yield "profile bomb", make_png(8, 8, (b"iCCP", b"k\0\0" + zeros), pixels=bytes(16))
    yield "international text bomb", make_png(8, 8, (b"iTXt", b"k\0\1\0\0\0" + zeros), pixels=bytes(16))
    yield "many chunks", make_png(8, 8, *[(b"tEXt", b"k\0v")] * 5000, pixels=bytes(16))
    yield "many scans", _repeat_scans(300)
    frames = [make_picture((20, 20), seed) for seed in range(3)]
    for kind in ("PNG", "WEBP", "GIF", "TIFF"):
        buffer = io.BytesIO()
        frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
        yield f"animated {kind}", buffer.getvalue()
    for kind in ("GIF", "BMP", "TIFF", "ICO", "PPM", "PDF", "EPS", "TGA", "SGI", "PCX", "DDS", "ICNS"):
        yield f"format {kind}", to_bytes(make_picture((32, 32)), kind)
    for number, text in enumerate(
        (SVG, b"<?xml version='1.0'?>" + SVG, b"\xef\xbb\xbf" + SVG, b"<html>", b"{}", b"%PDF-1.7")
    ):
        yield f"text {number}", text
    for seed in range(20):
        noise = random.Random(seed).randbytes(200)
        yield (
            f"noise {seed}",
            [b"", FILES["PNG"][:33], FILES["JPEG"][:20], FILES["WEBP"][:12]][seed % 4] + noise,
        )


def _patch_jpeg(width: int, height: int) -> bytes:
    at = FILES["JPEG"].index(b"\xff\xc0") + 5
    return FILES["JPEG"][:at] + struct.pack(">HH", height & 0xFFFF, width & 0xFFFF) + FILES["JPEG"][at + 4 :]


def _make_webp(kind: bytes, width: int, height: int) -> bytes:
    if kind == b"VP8X":
        body = bytes(4) + (width - 1).to_bytes(4, "little")[:3] + (height - 1).to_bytes(4, "little")[:3]
    elif kind == b"VP8L":
        body = b"\x2f" + ((width - 1 & 0x3FFF) | (height - 1 & 0x3FFF) << 14).to_bytes(4, "little") + bytes(8)
    else:
        body = b"\x10\x00\x00\x9d\x01\x2a" + struct.pack("<HH", width & 0x3FFF, height & 0x3FFF) + bytes(8)
    chunk = kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def _repeat_scans(count: int) -> bytes:
    buffer = io.BytesIO()
    PICTURE.convert("RGB").resize((64, 64), Image.Resampling.NEAREST).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    start = data.rindex(b"\xff\xda")
    return data[:start] + data[start:-2] * count + data[-2:]
