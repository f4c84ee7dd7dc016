"""TFRecord: what TensorFlow wrote is read back equal; damage is an error that says where."""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import re
import shutil
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import expect_error
from torch.utils.data import DataLoader

from quorate.data.tfrecord import Feature, Features, TFRecordDataset, example, write_records
from quorate.data.tfrecord.framing import framed
from quorate.data.tfrecord.index import index
from quorate.errors import DataError, SettingError

FILES = Path(__file__).parents[1] / "data" / "tfrecord"


def _contents() -> Any:
    spec = importlib.util.spec_from_file_location("make", FILES / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONTENTS = _contents()
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


# What TensorFlow wrote.


def test_examples_by_number(files: Path) -> None:
    data = TFRecordDataset(files / "images.tfrecord", FEATURES)
    assert len(data) == 7
    check([data[row] for row in range(7)], CONTENTS.EXAMPLES)
    check([data[-1]], CONTENTS.EXAMPLES[-1:])
    assert data.__getitems__([]) == []
    for row in (7, -8):
        with pytest.raises(IndexError, match="of 7"):
            data[row]
    for rows in ([0, 7], [-1, 0]):
        with pytest.raises(IndexError, match="of 7"):
            data.__getitems__(rows)


def test_several_files_are_one_dataset(files: Path) -> None:
    """In the order that they are named in, an empty one among them; rows in any order, repeated."""
    paths = [str(path) for path in sorted(files.glob("part-*"))]
    paths.insert(1, str(files / "empty.tfrecord"))
    data = TFRecordDataset(paths, FEATURES)
    check([data[row] for row in range(7)], CONTENTS.EXAMPLES)
    rows = [6, 0, 3, 2, 3, 5]
    check(data.__getitems__(rows), [CONTENTS.EXAMPLES[row] for row in rows])
    assert sorted(path.name for path in files.glob("part-*")) == [
        *("part-00000-of-00002.tfrecord", "part-00001-of-00002.tfrecord")
    ]  # no index answers to such a pattern


def test_records_as_they_are(files: Path) -> None:
    """Nothing, one byte, and more than is read at a time while indexing."""
    data = TFRecordDataset(files / "raw.tfrecord", bytes)
    assert [data[row] for row in range(3)] == CONTENTS.RAW


def test_compressed_files_are_refused(files: Path) -> None:
    for kind in ("gzip", "zlib"):
        with expect_error(DataError):
            TFRecordDataset(files / f"{kind}.tfrecord", FEATURES)


def test_no_record_at_all(files: Path) -> None:
    with expect_error(DataError):
        TFRecordDataset(files / "empty.tfrecord", FEATURES)
    with expect_error(DataError, name="paths", got="no record"):
        TFRecordDataset([], FEATURES)


def test_what_is_no_file(files: Path) -> None:
    with expect_error(DataError):
        TFRecordDataset(files / "nothing", FEATURES)
    os.mkfifo(files / "pipe")
    for place in (files, files / "pipe"):
        with expect_error(DataError):
            TFRecordDataset(place, FEATURES)


# Damage.


def damaged(whole: bytes, starts: list[int]) -> list[bytes]:
    """500 variants: cut, flipped, zeroed, repeated, removed, with a wrong checksum of each kind."""
    draw = random.Random(0)
    cuts = [whole[:at] for at in range(1, len(whole)) if at not in starts][::7]
    flips = [
        whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :]
        for at in (draw.randrange(len(whole)) for _ in range(280))
    ]
    found = cuts + flips
    for start in starts[:-1]:
        for field in (0, 8, 12):  # length, its checksum, data
            at = start + field
            found.append(whole[:at] + bytes(4) + whole[at + 4 :])
            found.append(whole[:at] + whole[at + 1 :])
            found.append(whole[:at] + b"!" + whole[at:])
    for end in starts[1:]:  # the checksum of the data
        found.append(whole[: end - 4] + struct.pack("<I", draw.getrandbits(32)) + whole[end:])
        # A length that is wrong, and has the right checksum.
        wrong = framed(bytes(draw.randrange(1 << 16)))[:12]
        found.append(whole[: end - 20] + wrong + whole[end - 8 :])
    while len(found) < 500:
        at, length = draw.randrange(len(whole)), draw.randrange(1, 60)
        found.append(whole[:at] + draw.randbytes(length) + whole[at + length :])
    return found


def test_500_damaged_files(files: Path) -> None:
    """Each is an error with file, record and offset, or every record that can be read is right."""
    path = files / "images.tfrecord"
    whole = path.read_bytes()
    starts = index(path).offsets.tolist()
    variants = damaged(whole, starts)
    assert len(variants) == 500
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
                    check([data[row]], CONTENTS.EXAMPLES[row : row + 1])
                except DataError as error:
                    told.append(str(error))
        for message in told:
            found = place.match(message)
            assert found is not None, message
            record, at = int(found[1]), int(found[2])
            assert record <= 7  # a wrong length may make a record of the end of another
            assert at == starts[record] or variant[: starts[record]] != whole[: starts[record]]
        errors += bool(told)
    assert errors == 500


def test_a_whole_record_less_is_no_damage_that_a_file_shows(files: Path) -> None:
    path = files / "images.tfrecord"
    starts = index(path).offsets.tolist()
    path.write_bytes(path.read_bytes()[: starts[5]])
    data = TFRecordDataset(path, FEATURES)
    check([data[row] for row in range(5)], CONTENTS.EXAMPLES[:5])
    assert len(data) == 5


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


def test_a_record_that_is_no_example(files: Path) -> None:
    data = TFRecordDataset(files / "raw.tfrecord", FEATURES)
    with expect_error(DataError):
        data[0]  # no bytes are an Example without features
    where = f"{files / 'raw.tfrecord'}, record 1"
    with expect_error(DataError, where=where, offset=16, hide=r"(?<=Example \()[^)]*"):
        data[1]


def test_an_exception_of_the_users_own_parser(files: Path) -> None:
    def parse(data: bytes) -> int:
        return int(data)

    data = TFRecordDataset(files / "raw.tfrecord", parse)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        data[1]
    assert caught.value.__notes__ == [f"quorate: in {files / 'raw.tfrecord'}, record 1, at byte 16"]


def test_a_file_that_changes_while_it_is_used(files: Path) -> None:
    path = files / "images.tfrecord"
    data = TFRecordDataset(path, FEATURES)
    stat, whole = path.stat(), path.read_bytes()
    path.write_bytes(whole[:-1])
    with expect_error(DataError):
        data[0]
    # With its old size and time, the record itself shows it.
    path.write_bytes(b"!" * len(whole))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with expect_error(DataError):
        data[3]
    path.unlink()
    with expect_error(DataError):
        data[0]


# The index.


def test_an_index_is_made_once(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files / "images.tfrecord"
    first = index(path)
    kept = files / ".images.tfrecord.index"
    assert kept.exists()
    with monkeypatch.context() as patch:
        patch.setattr("quorate.data.tfrecord.index._scan", pytest.fail)
        assert index(path).offsets.tolist() == first.offsets.tolist()
        os.chdir(files)
        assert index(Path("images.tfrecord")).path == path
    # Damaged, cut or of another file: it is made anew.
    good = kept.read_bytes()
    flipped = [good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :] for at in range(0, len(good), 3)]
    for content in (b"", good[:20], good[:-1], good + b"!", *flipped):
        kept.write_bytes(content)
        assert index(path).offsets.tolist() == first.offsets.tolist()
        assert kept.read_bytes() == good
    write_records(path, [b"another"])
    assert index(path).offsets.tolist() == [0, 23]
    assert sorted(p.name for p in files.glob(".*")) == [kept.name]  # no temporary file is left


def test_an_index_of_a_folder_that_cannot_be_written(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (files / ".images.tfrecord.index").mkdir()  # nothing can be written there, even by root
    first = index(files / "images.tfrecord")
    assert len(list((tmp_path / "cache" / "indexes").iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr("quorate.data.tfrecord.index._scan", pytest.fail)
        assert index(files / "images.tfrecord").offsets.tolist() == first.offsets.tolist()
    monkeypatch.setenv("QUORATE_DATA", str(files / "images.tfrecord"))  # nor there
    assert len(index(files / "images.tfrecord")) == 7
    assert "cannot be saved" in caplog.text


def test_a_million_records_open_in_less_than_a_second(tmp_path: Path) -> None:
    path = tmp_path / "many.tfrecord"
    path.write_bytes(framed(b"12345678") * 1_000_000)
    index(path)
    began = time.perf_counter()
    data = TFRecordDataset(path, bytes)
    assert len(data) == 1_000_000
    assert data[999_999] == b"12345678"
    assert time.perf_counter() - began < 1


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=60), st.randoms())
@settings(max_examples=25, deadline=None)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes], draw: random.Random
) -> None:
    path = tmp_path_factory.mktemp("written") / "a.tfrecord"
    assert write_records(path, records) == len(records)
    data = TFRecordDataset(path, bytes)
    rows = [draw.randrange(len(records)) for _ in range(80)]
    assert data.__getitems__(rows) == [records[row] for row in rows]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    write_records(path, [b"old"])

    def failing() -> Any:
        yield b"new"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_records(path, failing())
    assert TFRecordDataset(path, bytes)[0] == b"old"
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".index"] == ["a.tfrecord"]


# Examples of our own. That TensorFlow reads them: data/tfrecord/README.md.

NUMBERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
)
REALS = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20)


@given(
    st.dictionaries(
        st.text(max_size=9), st.one_of(st.binary(max_size=60), NUMBERS, REALS), min_size=1
    )
)
@settings(max_examples=40, deadline=None)
def test_an_example_is_read_back(values: dict[str, Any]) -> None:
    kinds = {
        name: "bytes"
        if isinstance(value, bytes)
        else "float"
        if isinstance(value, list) and isinstance(value[0], float)
        else "int64"
        for name, value in values.items()
    }
    data = example(values)
    assert data == example(dict(reversed(values.items())))
    read = Features({name: Feature(kind) for name, kind in kinds.items()})(data)
    for got, value in zip(read, values.values(), strict=True):
        plain = got if isinstance(got, bytes) else got.tolist()
        assert plain == ([value] if isinstance(value, int) else value)


def test_arrays_and_tensors_in_an_example() -> None:
    grid = np.arange(6).reshape(2, 3)
    data = example({"a": grid, "b": torch.from_numpy(grid) / 2, "c": np.zeros((0,), np.int64)})
    features = Features(
        {"a": Feature("int64", (2, 3)), "b": Feature("float", (2, 3)), "c": Feature("int64", (0,))}
    )
    a, b, c = features(data)
    assert a.tolist() == grid.tolist()
    assert b.tolist() == (grid / 2).tolist()
    assert c.shape == (0,)
    for value in (["text"], [], {1: 2}, 2**63, 2**70):
        with pytest.raises(SettingError):
            example({"d": value})


@given(st.binary(max_size=80))
@settings(max_examples=200, deadline=None)
def test_bytes_that_are_no_example(data: bytes) -> None:
    with pytest.raises(DataError):
        IMAGE_AND_LABEL(data)


def test_a_feature_that_cannot_be() -> None:
    for kind, shape in (("uint8", ()), ("int64", (-1,)), ("bytes", (1.5,)), ("float", ("a",))):
        with expect_error(SettingError):
            Feature(kind, shape)  # type: ignore[arg-type]
    with expect_error(SettingError, name="features"):
        Features({})


# Threads and processes.


def test_many_threads_read_at_once(files: Path) -> None:
    data = TFRecordDataset(sorted(files.glob("part-*")), FEATURES)
    with ThreadPoolExecutor(8) as pool:
        for samples in pool.map(
            data.__getitems__, [[row % 7, (row + 3) % 7] for row in range(200)]
        ):
            assert len(samples) == 2
        check(list(pool.map(data.__getitem__, range(7))), CONTENTS.EXAMPLES)


def test_processes_read_a_copy(files: Path) -> None:
    data = TFRecordDataset(files / "images.tfrecord", IMAGE_AND_LABEL)
    assert pickle.loads(pickle.dumps(data))[3][1] == CONTENTS.LABELS[3]
    loader = DataLoader(data, batch_size=3, num_workers=1)
    batches = list(loader)
    assert [tuple(images.shape) for images, _ in batches] == [(3, 12), (3, 12), (1, 12)]
    assert torch.cat([labels for _, labels in batches]).tolist() == CONTENTS.LABELS
