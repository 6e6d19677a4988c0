"""Encodes messages as bytes for another process: MessagePack, with arrays as an extension type.

An array consists of dtype (3 characters), number of dimensions (1 byte), shape (int64 each) and data.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np

Message = TypeVar("Message")
_ARRAY = 1  # code of the extension type


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_encode_array)


def decode(data: bytes, message_type: type[Message]) -> Message:
    """Return the encoded message. Its arrays are read-only views of `data` and may be unaligned.

    Raises:
        msgspec.MsgspecError: `data` is not a message of that type.
    """
    message: Message = _make_decoder(message_type).decode(data)  # type: ignore[arg-type]
    return message


@cache
def _make_decoder(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    # ext_hook has already made the array when dec_hook is called for the field.
    return msgspec.msgpack.Decoder(message_type, dec_hook=lambda _, array: array, ext_hook=_decode_array)


def _encode_array(array: Any) -> msgspec.msgpack.Ext:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"no message holds a {type(array).__name__}")
    head = array.dtype.str.encode() + struct.pack(f"<B{array.ndim}q", array.ndim, *array.shape)
    return msgspec.msgpack.Ext(_ARRAY, head + np.ascontiguousarray(array).tobytes())


def _decode_array(_: int, data: memoryview) -> np.ndarray:
    dtype, num_dims = bytes(data[:3]).decode(), data[3]
    shape = struct.unpack_from(f"<{num_dims}q", data, 4)
    return np.ndarray(shape, dtype, data.toreadonly(), 4 + 8 * num_dims)
