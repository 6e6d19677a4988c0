"""Decodes PNG, JPEG and WebP of one frame. The size is read from the header first: no bomb is decoded."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from engine.errors import InvalidRequest

MAX_BYTES = 32 * 2**20  # of one image file
MAX_PIXELS = 2**24  # 16 megapixels
MAX_SHAPE_RATIO = 200
MAX_SCANS = 100  # of a progressive JPEG, each of which costs a pass over the image; encoders write about 10
MAX_CHUNKS = 4096  # of a PNG before its pixels
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
# First bytes of a file -> its reader. Not `Image.open`, which has a limit of pixels of its own.
_READERS = {_PNG: PngImageFile, _JPEG: JpegImageFile, b"RIFF": WebPImageFile}
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
    reader = next((found for start, found in _READERS.items() if data.startswith(start)), None)
    if reader is None:
        raise refuse("the image must be a PNG, JPEG or WebP file")
    try:
        _check_parts(data)
        with warnings.catch_warnings(), reader(io.BytesIO(data)) as image:  # reads the header only
            warnings.simplefilter("ignore")
            check_size(*image.size)
            if getattr(image, "is_animated", False):
                raise refuse("animated images are not supported: send one frame")
            image.load()
            return flatten(ImageOps.exif_transpose(image))
    except InvalidRequest:
        raise
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


def refuse(message: str) -> InvalidRequest:
    return InvalidRequest(message, "messages")


def _check_parts(data: bytes) -> None:
    """Refuse a file whose parts are so many that reading them takes seconds."""
    if data.startswith(_JPEG) and data.count(b"\xff\xda") > MAX_SCANS:
        raise refuse(f"the JPEG has more than {MAX_SCANS} scans")
    offset = len(_PNG)
    for _ in range(MAX_CHUNKS if data.startswith(_PNG) else 0):
        length, kind = struct.unpack_from(">I4s", data, offset)
        if kind == b"IDAT":
            return
        offset += 12 + length
    if data.startswith(_PNG):
        raise refuse(f"the PNG has more than {MAX_CHUNKS} chunks before its pixels")
