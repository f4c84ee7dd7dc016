"""TFRecord files without TensorFlow: a map-style dataset and a writer.

::

    train = TFRecordDataset(
        "train.tfrecord",
        Features({"image_raw": Feature("bytes", (1, 28, 28)), "label": Feature("int64", ())}),
    )
    image, label = train[0]  # uint8 (1, 28, 28) and int64 ()
"""

from importlib.util import find_spec

from quorate.errors import PackageError

if find_spec("google") is None or find_spec("google.protobuf") is None:
    raise PackageError("protobuf", "data", "TFRecord files")

from quorate.data.tfrecord.dataset import TFRecordDataset
from quorate.data.tfrecord.example import Feature, Features, example
from quorate.data.tfrecord.framing import write_records

__all__ = ["Feature", "Features", "TFRecordDataset", "example", "write_records"]
