"""Writes the files beside it with TensorFlow; see README.md. Without TensorFlow: what they hold."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
LABELS = [0, 1, -1, 9, 2**63 - 1, -(2**63), 300]

EXAMPLES: list[dict[str, Any]] = [
    {
        "image_raw": bytes((31 * number + 7 * k) % 256 for k in range(12)),
        "label": [label],
        "weights": [0.5 * number, -1.25, 3.4028234663852886e38],  # exact in float32
        "name": f"Bild {number} 图像".encode(),
        "tags": list(range(number)),
    }
    for number, label in enumerate(LABELS)
]
RAW = [b"", b"x", bytes(k % 251 for k in range(40_000))]


def main() -> None:
    """Write the files, or print what is in one."""
    import tensorflow as tf

    def feature(value: Any) -> Any:
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        if value and isinstance(value[0], float):
            return tf.train.Feature(float_list=tf.train.FloatList(value=value))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value))

    def serialized(values: dict[str, Any]) -> bytes:
        features = {name: feature(value) for name, value in values.items()}
        return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()

    def write(name: str, records: list[bytes], compression: str = "") -> None:
        options = tf.io.TFRecordOptions(compression_type=compression)
        with tf.io.TFRecordWriter(str(FOLDER / name), options) as writer:
            for record in records:
                writer.write(record)

    parser = argparse.ArgumentParser()
    parser.add_argument("--check", type=Path, help="a file that should hold EXAMPLES")
    options = parser.parse_args()
    examples = [serialized(values) for values in EXAMPLES]
    if options.check:
        found = [r.numpy() for r in tf.data.TFRecordDataset(str(options.check))]
        for data, expected in zip(found, examples, strict=True):
            assert tf.train.Example.FromString(data) == tf.train.Example.FromString(expected)
        print(f"{len(found)} Examples, equal")
        return
    write("images.tfrecord", examples)
    write("part-00000-of-00002.tfrecord", examples[:3])
    write("part-00001-of-00002.tfrecord", examples[3:])
    write("raw.tfrecord", RAW)
    write("empty.tfrecord", [])
    write("gzip.tfrecord", examples, "GZIP")
    write("zlib.tfrecord", examples, "ZLIB")


if __name__ == "__main__":
    main()
