"""tf.train.Example, the message type of most TFRecord files, without TensorFlow.

    Example   features: a map from a name to a Feature
    Feature   one of: a list of byte strings, a list of float32, a list of int64

The messages are declared in this module, as in tensorflow/core/example/{example,feature}.proto, in
a separate pool, and protobuf reads and writes the messages.
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
    """The declaration of a feature: its kind and the shape of its tensor.

    Args:
        kind: "bytes", "float" (float32) or "int64".
        shape: shape of the tensor. The tensor has the dtype of ``kind``; for "bytes" the tensor is
            uint8 and holds the bytes of one string, such as an image. (): a single value. None: any
            number of values, (n,); for "bytes", one string, returned as ``bytes``.
    """

    kind: str
    shape: tuple[int, ...] | None = None
    size: int | None = field(init=False, repr=False)  # number of values, or of bytes

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
    """Parse tf.train.Example records into tensors. Features not listed are ignored.

    Args:
        features: a dict from the name of a feature to its ``Feature``. Samples have the features in
            the order of the dict.
    """

    def __init__(self, features: Mapping[str, Feature]) -> None:
        if not features:
            raise SettingError("features", {}, "at least one", "declare what to read")
        self.features = dict(features)

    def __call__(self, data: bytes) -> tuple[Any, ...]:
        """Parse a serialized Example into a tuple with a tensor, or ``bytes``, per feature.

        Raises:
            DataError: the data is not an Example, or a feature is missing or does not match its
                declaration.
        """
        return self.samples([self.values(data)])[0]

    def values(self, data: bytes) -> list[Any]:
        """Return the checked values of the features: ``bytes``, a number, or a list of numbers.

        Raises:
            DataError: the data is not an Example, or a feature is missing or does not match its
                declaration.
        """
        try:
            features = _EXAMPLE.FromString(data).features.feature
        except DecodeError as error:
            got = f"{len(data):,} bytes that are not an Example ({error})"
            raise DataError("message", got=got, expected="a tf.train.Example") from error
        return [_value(name, features.get(name), want) for name, want in self.features.items()]

    def samples(self, values: Sequence[list[Any]]) -> list[tuple[Any, ...]]:
        """Turn the results of ``values`` for several Examples into samples of tensors.

        Tensors of the same shape are views of one block of memory. Separate tensors would take most
        of the time of a batch.
        """
        columns = zip(*values, strict=True)
        features = self.features.values()
        tensors = (_tensors(column, want) for column, want in zip(columns, features, strict=True))
        return list(zip(*tensors, strict=True))


def example(features: Mapping[str, Any]) -> bytes:
    """Serialize features to a tf.train.Example. The same features give the same bytes.

    Args:
        features: a dict from name to ``bytes``, or to integers or real numbers: a single number, or
            a sequence, array or tensor of any shape, taken in row-major order. Real numbers become
            float32.

    Raises:
        SettingError: a value has another type, or is an empty sequence, whose kind is unknown.
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
        raw = np.frombuffer(bytearray().join(column), np.uint8)  # torch requires writable memory
        return torch.from_numpy(raw).view(len(column), *want.shape).unbind()
    dtype = torch.int64 if want.kind == "int64" else torch.float32
    if want.shape is None:
        return [torch.tensor(values, dtype=dtype) for values in column]
    return torch.tensor(column, dtype=dtype).view(len(column), *want.shape).unbind()


def _wrong(name: str, got: str, want: Feature) -> DataError:
    return DataError(f'feature "{name}"', got=got, expected=want)


def _declared() -> Any:
    """Return the message class of Example."""
    file = text_format.Parse(_PROTO, FileDescriptorProto())
    pool = DescriptorPool()  # not the common pool, which may contain TensorFlow's own
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
