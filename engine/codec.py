"""Messages as bytes, for those that cross a process: MessagePack, with arrays as an extension type.

An array is its dtype (3 characters), its number of dimensions (1 byte), its shape (int64 each) and its data.
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
    """The message as bytes."""
    return msgspec.msgpack.encode(message, enc_hook=_encode_array)


def decode(data: bytes, message_type: type[Message]) -> Message:
    """The message that was encoded. Its arrays are read-only views of `data`, at any alignment.

    Raises:
        msgspec.MsgspecError: `data` is no message of that type.
    """
    message: Message = _make_decoder(message_type).decode(data)  # type: ignore[arg-type]
    return message


@cache
def _make_decoder(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    # The extension type has been decoded when the hook of the field's type is asked.
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
