"""Messages between any two parties of a run: plain values and tensors, as MessagePack.

A message is a dict, or a ``msgspec.Struct`` whose class the reader expects: see ``MessageReader``.
The values are numbers, texts, bytes, lists, dicts, tensors and exceptions, as deep as the sender
likes. In a dict tuples arrive as lists. An exception of user code is rebuilt as ``remote_error``
says. No object of an unexpected class is ever constructed: bytes from a network cannot run code.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext

from quorate.engines import remote_error

T = TypeVar("T")

# Codes of MessagePack's extension types; _ZEROS is a compressed tensor.
_TENSOR, _ERROR, _TEXT, _INTEGER, _DICT, _APART, _ZEROS = range(7)


def pack(message: Any, apart: list[torch.Tensor] | None = None) -> bytes:
    """Return the bytes of a message. Waits for the device of a tensor.

    Args:
        apart: an empty list for the tensors, if their values travel apart.

    Raises:
        TypeError: a value of another kind.
    """
    hook, encoder = _as_extension, _ENCODER
    if apart is not None:
        hook = partial(_set_apart, apart)
        encoder = msgspec.msgpack.Encoder(enc_hook=hook)
    try:
        return encoder.encode(message)
    except (UnicodeEncodeError, OverflowError):  # the name of a file may be no UTF-8
        if apart is not None:
            apart.clear()
        plain = msgspec.to_builtins(message, builtin_types=(bytes, Ext), enc_hook=hook)
        return _ENCODER.encode(_with_extensions(plain))


def unpack(packed: bytes | memoryview) -> Any:
    """Return the message that was packed.

    Raises:
        msgspec.DecodeError: bytes that ``pack`` did not make.
    """
    return _DECODER.decode(packed)


def unpack_apart(packed: bytes, device: torch.device) -> tuple[Any, list[torch.Tensor]]:
    """Return a message, and new memory for the tensors whose values travel apart, in order.

    Args:
        device: for tensors that are not on the CPU of the sender; "meta" for no memory at all.
    """
    apart: list[torch.Tensor] = []

    def hook(code: int, data: memoryview) -> Any:
        if code == _DICT:  # maybe with tensors
            return dict(decoder.decode(data))
        if code != _APART:
            return _from_extension(code, data)
        dtype, shape, is_on_cpu = msgspec.msgpack.decode(data)
        place = torch.device("cpu") if is_on_cpu and device.type != "meta" else device
        apart.append(torch.empty(shape, dtype=getattr(torch, dtype), device=place))
        return apart[-1]

    decoder = msgspec.msgpack.Decoder(ext_hook=hook)
    return decoder.decode(packed), apart


class MessageReader(Generic[T]):
    """Returns messages as objects of the expected classes.

    Create readers on import: msgspec 0.21 may crash if two threads use a class for the first time.

    Args:
        kind: a ``msgspec.Struct``, or a union of tagged ones.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._decoder = msgspec.msgpack.Decoder(kind, ext_hook=_from_extension)

    def unpack(self, packed: bytes | memoryview) -> T:
        """Return the message that was packed.

        Raises:
            msgspec.DecodeError: no message of the expected classes.
        """
        try:
            message: T = self._decoder.decode(packed)
        except msgspec.ValidationError:  # texts and dicts may be extensions, see ``pack``
            message = msgspec.convert(unpack(packed), self._kind)
        return message


def _as_extension(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        head = _ENCODER.encode([str(value.dtype).removeprefix("torch."), value.shape])
        flat = value.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes()
        is_zeros = flat.dtype == torch.int64 and int(flat.count_nonzero()) < len(flat) // 2
        code = _ZEROS if is_zeros else _TENSOR  # a large confusion matrix is mostly zeros
        body = zlib.compress(raw, 1) if is_zeros else raw
        return Ext(code, b"".join([bytes([len(head)]), head, body]))
    if isinstance(value, BaseException):
        return Ext(_ERROR, pack(remote_error.to_json(value)))
    for plain in (str, int, float):
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"a message cannot hold a {type(value).__name__}")


def _set_apart(apart: list[torch.Tensor], value: object) -> Any:
    if not isinstance(value, torch.Tensor):
        return _as_extension(value)
    apart.append(value.detach())
    dtype = str(value.dtype).removeprefix("torch.")
    return Ext(_APART, _ENCODER.encode([dtype, value.shape, value.device.type == "cpu"]))


def _from_extension(code: int, data: memoryview) -> Any:
    if code in (_TENSOR, _ZEROS):
        begin = 1 + data[0]
        dtype, shape = msgspec.msgpack.decode(data[1:begin])
        raw = data[begin:] if code == _TENSOR else zlib.decompress(data[begin:])
        # In memory that torch aligns: the bits that kernels return may depend on alignment.
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(raw, np.uint8)
        return tensor
    if code == _ERROR:
        return remote_error.from_json(unpack(data))
    if code == _TEXT:
        return bytes(data).decode(errors="surrogatepass")
    if code == _INTEGER:
        return int.from_bytes(data, signed=True)
    if code == _DICT:
        return dict(unpack(data))
    raise ValueError(f"a message has an extension of unknown code {code}")


def _with_extensions(value: Any) -> Any:
    """Return a value with extensions for what MessagePack lacks.

    These are texts with lone surrogates, and integers beyond 64 bits. Texts are all replaced, and
    dicts, as an extension cannot be a key.
    """
    if isinstance(value, str):
        return Ext(_TEXT, value.encode(errors="surrogatepass"))
    if isinstance(value, int) and not isinstance(value, bool):
        return Ext(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, signed=True))
    if isinstance(value, dict):
        pairs = [[_with_extensions(each) for each in pair] for pair in value.items()]
        return Ext(_DICT, _ENCODER.encode(pairs))
    if isinstance(value, list | tuple):
        return [_with_extensions(each) for each in value]
    return value


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_as_extension)
_DECODER = msgspec.msgpack.Decoder(ext_hook=_from_extension)
