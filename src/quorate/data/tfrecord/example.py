"""tf.train.Example, the message that most TFRecord files hold, without TensorFlow.

    Example   features: a map from a name to a Feature
    Feature   one of: a list of byte strings, a list of float32, a list of int64

The messages are declared here as tensorflow/core/example/{example,feature}.proto declare them, in a
pool of their own, and protobuf reads and writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from quorate.errors import DataError, SettingError
from quorate.settings import one_of

_LARGEST = np.iinfo(np.int64).max
KINDS = {"bytes": "bytes_list", "float": "float_list", "int64": "int64_list"}


@dataclass(frozen=True)
class Feature:
    """What a feature must be, and what becomes of it.

    Args:
        kind: "bytes", "float" (float32) or "int64".
        shape: Of the tensor, which has the feature's kind as its dtype, and for "bytes" is uint8
            and holds the bytes of one string: an image, say. () is one value. None for as many
            values as there are, (n,), and for "bytes" for one string as it is, a ``bytes``.
    """

    kind: str
    shape: tuple[int, ...] | None = None
    size: int | None = field(init=False, repr=False)  # how many values, or bytes

    def __post_init__(self) -> None:
        one_of("kind", self.kind, tuple(KINDS))
        if self.shape is not None and not all(
            isinstance(size, int) and size >= 0 for size in self.shape
        ):
            raise SettingError("shape", self.shape, "sizes >= 0", "pass a tuple of ints")
        object.__setattr__(self, "size", None if self.shape is None else math.prod(self.shape))

    def __str__(self) -> str:
        if self.shape is None:
            return "one string" if self.kind == "bytes" else f"{self.kind} values"
        return f"{self.kind} of shape {self.shape}"


class Features:
    """The features of an Example that are to be read; others in it are passed over.

    Args:
        features: By their names. They come out in this order.
    """

    def __init__(self, features: Mapping[str, Feature]) -> None:
        if not features:
            raise SettingError("features", {}, "at least one", "declare what to read")
        self.features = dict(features)

    def __call__(self, data: bytes) -> tuple[Any, ...]:
        """Return the features of a serialized Example: a tensor each, or ``bytes``.

        Raises:
            DataError: it is no Example, a feature is missing, or is another than was declared.
        """
        return self.samples([self.values(data)])[0]

    def values(self, data: bytes) -> list[Any]:
        """Return the values of the features, checked: ``bytes``, or a number or a list of them.

        Raises:
            DataError: as above.
        """
        try:
            features = _EXAMPLE.FromString(data).features.feature
        except DecodeError as error:
            got = f"{len(data):,} bytes that are not an Example ({error})"
            raise DataError("message", got=got, expected="a tf.train.Example") from error
        return [_value(name, features.get(name), want) for name, want in self.features.items()]

    def samples(self, values: Sequence[list[Any]]) -> list[tuple[Any, ...]]:
        """Turn what ``values`` returned for several Examples into tensors.

        A tensor for each value would take most of the time that a batch takes: those of one shape
        are made together, and are views of one memory.
        """
        columns = zip(*values, strict=True)
        features = self.features.values()
        tensors = (_tensors(column, want) for column, want in zip(columns, features, strict=True))
        return list(zip(*tensors, strict=True))


def example(features: Mapping[str, Any]) -> bytes:
    """Serialize an Example; the same features give the same bytes.

    Args:
        features: Name -> ``bytes``, or whole or real numbers: one, or a sequence, array or tensor
            of any shape, whose values are taken in row-major order. Real ones become float32.

    Raises:
        SettingError: a value is none of these, or an empty sequence, which does not say of what.
    """
    message = _EXAMPLE()
    for name, value in features.items():
        feature = message.features.feature[name]
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
            continue
        flat = np.asarray(value).ravel()
        if not flat.size and isinstance(value, (list, tuple)):
            raise SettingError(name, value, "values", "of none, pass an array: it has a dtype")
        if flat.dtype.kind in "iub":
            if flat.dtype == np.uint64 and flat.max(initial=0) > _LARGEST:
                raise SettingError(name, int(flat.max()), "numbers of int64", "use bytes")
            feature.int64_list.value.extend(flat.tolist())
        elif flat.dtype.kind == "f":
            feature.float_list.value.extend(flat.tolist())
        else:
            kind = f"{type(value).__name__} of {flat.dtype}"
            raise SettingError(name, kind, "bytes or numbers", "convert it to one of them")
    serialized: bytes = message.SerializeToString(deterministic=True)
    return serialized


def _value(name: str, feature: Any, want: Feature) -> Any:
    if feature is None:
        raise _wrong(name, "no such feature", want)
    held = feature.WhichOneof("kind")
    if held != KINDS[want.kind]:
        kind = next((kind for kind, message in KINDS.items() if message == held), "no")
        raise _wrong(name, f"{kind} values", want)
    values = getattr(feature, held).value
    if want.kind == "bytes":
        if len(values) != 1:
            raise _wrong(name, f"{len(values)} strings", want)
        if want.size is not None and len(values[0]) != want.size:
            raise _wrong(name, f"{len(values[0]):,} bytes", want)
        return values[0]
    if want.size is not None and len(values) != want.size:
        raise _wrong(name, f"{len(values):,} values", want)
    return values[0] if want.shape == () else list(values)


def _tensors(column: Sequence[Any], want: Feature) -> Sequence[Any]:
    if want.kind == "bytes":
        if want.shape is None:
            return column
        raw = np.frombuffer(bytearray().join(column), np.uint8)  # torch wants it to be writable
        return torch.from_numpy(raw).view(len(column), *want.shape).unbind()
    dtype = torch.int64 if want.kind == "int64" else torch.float32
    if want.shape is None:
        return [torch.tensor(values, dtype=dtype) for values in column]
    return torch.tensor(column, dtype=dtype).view(len(column), *want.shape).unbind()


def _wrong(name: str, got: str, want: Feature) -> DataError:
    return DataError(f'feature "{name}"', got=got, expected=want)


def _declared() -> Any:
    """Return the class of Example."""
    file = text_format.Parse(_PROTO, FileDescriptorProto())
    pool = DescriptorPool()  # in the common one TensorFlow's own may lie
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


_PROTO = """
name: "example.proto" package: "tensorflow" syntax: "proto3"
message_type {
  name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES }
}
message_type {
  name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT }
}
message_type {
  name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
}
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: "BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: "FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: "Int64List" oneof_index: 0 }
}
message_type {
  name: "Features"
  field {
    name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "FeatureEntry"
  }
  nested_type {
    name: "FeatureEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: "Feature" }
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" }
}
"""
_EXAMPLE = _declared()
