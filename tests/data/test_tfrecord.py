"""TFRecord: TensorFlow's files are read back equal; damage is an error with the place."""

import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import expect_error

from quorate.data.tfrecord import Feature, Features, TFRecordDataset, example, write_records
from quorate.data.tfrecord.framing import framed
from quorate.errors import DataError, SettingError

FILES = Path(__file__).parents[1] / "data" / "tfrecord"


LABELS = [0, 1, -1, 9, 2**63 - 1, -(2**63), 300]
EXAMPLES: list[dict[str, Any]] = [  # written by TensorFlow, see data/tfrecord/README.md
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
FEATURES = Features(
    {
        "image_raw": Feature("bytes", (1, 4, 3)),
        "label": Feature("int64", ()),
        "weights": Feature("float", (3,)),
        "name": Feature("bytes"),
        "tags": Feature("int64"),
    }
)
IMAGE_AND_LABEL = Features({"image_raw": Feature("bytes", (12,)), "label": Feature("int64", ())})


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TensorFlow's files, where indexes may be written."""
    monkeypatch.setenv("QUORATE_DATA", str(tmp_path / "cache"))
    return Path(shutil.copytree(FILES, tmp_path / "files"))


def check(samples: list[Any], expected: list[dict[str, Any]]) -> None:
    assert len(samples) == len(expected)
    for (image, label, weights, name, tags), values in zip(samples, expected, strict=True):
        assert image.dtype == torch.uint8
        assert image.shape == (1, 4, 3)
        assert bytes(image.flatten().tolist()) == values["image_raw"]
        assert label.dtype == torch.int64
        assert label.shape == ()
        assert [label.item()] == values["label"]
        assert weights.dtype == torch.float32
        assert weights.tolist() == values["weights"]
        assert name == values["name"]
        assert tags.dtype == torch.int64
        assert tags.tolist() == values["tags"]


# Files written by TensorFlow.


def test_examples_of_one_file_and_of_several(files: Path) -> None:
    whole = TFRecordDataset(files / "images.tfrecord", FEATURES)
    parts = TFRecordDataset(sorted(files.glob("part-*")), FEATURES)
    for data in (whole, parts):
        check(data.__getitems__([*range(7)]), EXAMPLES)
    check([parts[3]], EXAMPLES[3:4])


def test_records_as_they_are_and_an_exception_of_the_users_own_parser(files: Path) -> None:
    """Records of no byte, of one byte, and of more bytes than are read at a time while indexing."""
    data = TFRecordDataset(files / "raw.tfrecord", bytes)
    assert [data[row] for row in range(3)] == RAW
    with pytest.raises(ValueError, match="invalid literal") as caught:
        TFRecordDataset(files / "raw.tfrecord", int)[1]
    assert caught.value.__notes__ == [f"quorate: in {files / 'raw.tfrecord'}, record 1, at byte 16"]


@pytest.mark.parametrize("name", ["gzip.tfrecord", "zlib.tfrecord"])
def test_a_compressed_file_is_refused(files: Path, name: str) -> None:
    with expect_error(DataError):
        TFRecordDataset(files / name, FEATURES)


# Damage.


def damaged(whole: bytes, starts: list[int]) -> list[bytes]:
    """Variants: cut, flipped, zeroed, removed, inserted, with a wrong length."""
    draw = random.Random(0)
    found = [whole[:at] for at in range(1, len(whole)) if at not in starts][::14]
    for at in (draw.randrange(len(whole)) for _ in range(60)):
        found.append(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
    for start in starts[:-1]:
        for field in (0, 8, 12):  # length, checksum of the length, data
            at = start + field
            found.append(whole[:at] + bytes(4) + whole[at + 4 :])
            found.append(whole[:at] + whole[at + 1 :])
            found.append(whole[:at] + b"!" + whole[at:])
    for end in starts[1:]:  # a wrong length with the right checksum
        wrong = framed(bytes(draw.randrange(1 << 16)))[:12]
        found.append(whole[: end - 20] + wrong + whole[end - 8 :])
    return found


def test_damaged_files(files: Path) -> None:
    """Each gives an error with file, record and offset, or every readable record is right."""
    path = files / "images.tfrecord"
    whole = path.read_bytes()
    starts = [0]
    while starts[-1] < len(whole):  # length, checksum, data, checksum
        length = int.from_bytes(whole[starts[-1] : starts[-1] + 8], "little")
        starts.append(starts[-1] + 12 + length + 4)
    variants = damaged(whole, starts)
    assert whole not in variants
    place = re.compile(rf"^{re.escape(str(path))}, record (\d+) at byte (\d+): got [^\n]+$")
    errors = 0
    for variant in variants:
        path.write_bytes(variant)
        told = []
        try:
            data = TFRecordDataset(path, FEATURES)
        except DataError as error:
            told.append(str(error))
        else:
            for row in range(len(data)):
                try:
                    check([data[row]], EXAMPLES[row : row + 1])
                except DataError as error:
                    told.append(str(error))
        for message in told:
            found = place.match(message)
            assert found is not None, message
            record, at = int(found[1]), int(found[2])
            assert record <= 7  # a wrong length may make a record of the end of another
            assert at == starts[record] or variant[: starts[record]] != whole[: starts[record]]
        errors += bool(told)
    assert errors == len(variants) > 150


def test_a_wrong_feature(files: Path) -> None:
    path = files / "images.tfrecord"
    for name, feature in (
        ("labels", Feature("int64", ())),
        ("label", Feature("float", ())),
        ("label", Feature("bytes")),
        ("label", Feature("int64", (2,))),
        ("weights", Feature("float", ())),
        ("image_raw", Feature("bytes", (28, 28))),
        ("tags", Feature("int64", (2,))),
    ):
        data = TFRecordDataset(path, Features({name: feature}))
        with expect_error(DataError, where=f"{path}, record 0", offset=0):
            data.__getitems__([0, 1])


# Examples of our own. TensorFlow reads them: data/tfrecord/README.md.


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=20))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("written") / "a.tfrecord"
    assert write_records(path, records) == len(records)
    rows = range(len(records) - 1, -1, -1)
    assert TFRecordDataset(path, bytes).__getitems__([*rows]) == records[::-1]


GRID = np.arange(6).reshape(2, 3)


@pytest.mark.parametrize(
    ("kind", "shape", "value"),
    [
        ("bytes", None, b""),
        ("int64", (), -(2**63)),
        ("int64", None, [0, 127, 128, -1, 2**63 - 1]),
        ("float", None, [0.1, -0.0, float("inf"), 3.4028234663852886e38]),
        ("int64", (2, 3), GRID),
        ("float", (2, 3), torch.from_numpy(GRID) / 2),
    ],
)
def test_an_example_is_read_back(kind: str, shape: tuple[int, ...] | None, value: Any) -> None:
    data = example({"b": value, "a": b"x"})
    assert data == example({"a": b"x", "b": value})
    (read,) = Features({"b": Feature(kind, shape)})(data)
    assert read == value if kind == "bytes" else torch.equal(read, torch.as_tensor(value))


def test_values_and_features_that_cannot_be() -> None:
    for value in (["text"], [], {1: 2}, 2**63):
        with pytest.raises(SettingError):
            example({"d": value})
    for kind, shape in (("uint8", ()), ("int64", (-1,)), ("bytes", (1.5,))):
        with expect_error(SettingError):
            Feature(kind, shape)  # type: ignore[arg-type]
    with expect_error(SettingError, name="features"):
        Features({})


@given(st.binary(max_size=80))
@settings(max_examples=60, deadline=None)
def test_bytes_that_are_no_example(data: bytes) -> None:
    with pytest.raises(DataError):
        IMAGE_AND_LABEL(data)
