"""Decodes PNG, JPEG and WebP of one frame. Format and size are read from the header first: no bomb is decoded."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

from PIL import Image, ImageOps, UnidentifiedImageError

from engine.errors import InvalidRequest

MAX_BYTES = 32 * 2**20  # of one image file
MAX_PIXELS = 2**24  # 16 megapixels
MAX_SHAPE_RATIO = 200
MAX_SCANS = 100  # of a progressive JPEG, each of which costs a pass over the image; encoders write about 10
MAX_CHUNKS = 4096  # of a PNG before its pixels
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
# Markers of a JPEG that give its size: every start of frame.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# What Pillow raises for files that are broken on purpose.
_DECODE_ERRORS = (
    *(OSError, SyntaxError, EOFError, struct.error, zlib.error, ArithmeticError, AttributeError),
    *(LookupError, TypeError, ValueError, MemoryError, RuntimeError, Warning, Image.DecompressionBombError),
)


def decode_image(data: bytes) -> Image.Image:
    """Return the image in RGB, turned as its EXIF data says, on white where it is transparent.

    Raises:
        InvalidRequest: the format is not supported, the image is too large, animated or broken.
    """
    try:
        kind, width, height = read_header(data)
        check_size(width, height)
        with warnings.catch_warnings(), Image.open(io.BytesIO(data), formats=[kind]) as image:
            warnings.simplefilter("ignore")
            if image.size != (width, height):
                raise ValueError("its header gives two sizes")
            image.load()
            return flatten(ImageOps.exif_transpose(image))
    except InvalidRequest:
        raise
    except UnidentifiedImageError as error:  # its text names an object of this process
        raise refuse(f"the image cannot be decoded: its content is not {kind}") from error
    except _DECODE_ERRORS as error:
        raise refuse(f"the image cannot be decoded: {str(error)[:200] or type(error).__name__}") from error


def flatten(image: Image.Image) -> Image.Image:
    """Return an image in RGB, on white where it is transparent."""
    if image.mode == "RGB":
        return image
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def check_size(width: int, height: int) -> None:
    """Raise InvalidRequest for an image that is too large or too long."""
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise refuse(f"the image has {width} x {height} pixels; it must have 1 to {MAX_PIXELS} pixels")
    if max(width, height) > MAX_SHAPE_RATIO * min(width, height):
        raise refuse(
            f"the image has {width} x {height} pixels; one side must be at most {MAX_SHAPE_RATIO} times the other"
        )


def read_header(data: bytes) -> tuple[str, int, int]:
    """Return Pillow's name of the format, width and height, without decoding anything.

    Raises:
        InvalidRequest: another format, or an animation.
        ValueError, struct.error, IndexError: the header is broken.
    """
    if data.startswith(_PNG):
        return "PNG", *_read_png(data)
    if data.startswith(_JPEG):
        return "JPEG", *_read_jpeg(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP", *_read_webp(data)
    raise refuse("the image must be a PNG, JPEG or WebP file")


def refuse(message: str) -> InvalidRequest:
    return InvalidRequest(message, "messages")


def _read_png(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise ValueError("the first chunk is not IHDR")
    width, height = struct.unpack_from(">II", data, 16)
    offset = len(_PNG)
    for _ in range(MAX_CHUNKS):
        length, kind = struct.unpack_from(">I4s", data, offset)
        if kind == b"acTL":
            raise refuse("animated images are not supported: send one frame")
        if kind == b"IDAT":
            return width, height
        offset += 12 + length
    raise ValueError("it has too many chunks")


def _read_jpeg(data: bytes) -> tuple[int, int]:
    if data.count(b"\xff\xda") > MAX_SCANS:
        raise refuse(f"the JPEG has more than {MAX_SCANS} scans")
    offset = 2
    while True:
        if data[offset] != 0xFF:
            raise ValueError("a marker is missing")
        marker = data[offset + 1]
        if marker == 0xFF:  # padding
            offset += 1
            continue
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, offset + 5)
            return width, height
        length = struct.unpack_from(">H", data, offset + 2)[0]
        if marker == 0xDA or length < 2:
            raise ValueError("the size is missing")
        offset += 2 + length


def _read_webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        if data[20] & 2:
            raise refuse("animated images are not supported: send one frame")
        sides = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        width, height = sides
        return width, height
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ValueError(f"the chunk {kind!r} is unknown")
