"""Tar files: any row by its number, an index that is kept, files that are cut or damaged."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import io
import os
import pickle
import tarfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.messages import expect_error

from quorate.data.streams import TarDataset
from quorate.data.streams import tar as tar_module
from quorate.errors import DataError

ROWS = {f"a/{n:04d}": {"txt": f"row {n}".encode(), "cls": b"%d" % (n % 3)} for n in range(25)}


def write(path: Path, rows: Mapping[str, Mapping[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for key, members in rows.items():
            for kind, content in members.items():
                info = tarfile.TarInfo(f"{key}.{kind}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_any_row_by_its_number(tmp_path: Path, layout: int) -> None:
    name = "folder/" * 14 + "x" * 80 * (layout != tarfile.USTAR_FORMAT)
    long = {f"{name}{n}": {"seg.png": b"\0" * n} for n in range(3)}
    files = [
        write(tmp_path / "0.tar", ROWS, format=layout),
        write(tmp_path / "1.tar", {}, format=layout),
        write(tmp_path / "2.tar", long, format=layout),
    ]
    rows = TarDataset(files)
    expected = [
        {"__key__": key} | dict(members) for each in (ROWS, long) for key, members in each.items()
    ]
    assert len(rows) == 28
    assert rows.starts.tolist() == [0, 25, 25, 28]
    assert [rows[n] for n in range(28)] == expected
    assert rows[-1] == expected[-1]
    assert rows.__getitems__([27, 0, 3]) == [expected[27], expected[0], expected[3]]
    with pytest.raises(IndexError, match="row 28 of 28"):
        rows[28]
    decoded = TarDataset(files[0], decode=lambda found: int(found["cls"]))
    assert [decoded[n] for n in range(5)] == [0, 1, 2, 0, 1]


def test_names_that_are_no_utf_8_and_folders(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        folder = tarfile.TarInfo("some")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        info = tarfile.TarInfo("some/\udcff.x.y")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"1"))
        tar.addfile(tarfile.TarInfo("plain"))
    rows = TarDataset(tmp_path / "a.tar")
    assert rows_of(rows) == [{"__key__": "some/\udcff", "x.y": b"1"}]


NAMES = (
    *("0001.jpg", "0001.CLS", "0001.seg.png", "a.b/0001.jpg", "a.b/0001.txt", "a/b/x.y.z"),
    *("0001.jpg", "README", "a/README", "__info__/about.json", "__info__.json", ".hidden", "._0.x"),
    *(
        "a/.hidden",
        "a/._1.jpg",
        "b.c/.x",
        "odd..dots",
        "end.",
        "a/end.",
        "./0002.txt",
        "./0002.Jpg",
    ),
    *("Upper.JSON", "line\nbreak/1.jpg", "space in/a b.txt", "\u00fc.t\u00c4xt"),
)
FOUND = [  # by webdataset 1.0.2: keys, and the length of each member
    {"__key__": "0001", "jpg": 0, "cls": 1, "seg.png": 2},
    {"__key__": "a.b/0001", "jpg": 3, "txt": 4},
    {"__key__": "a/b/x", "y.z": 5},
    {"__key__": "0001", "jpg": 6},
    {"__key__": "__info__", "json": 10},
    {"__key__": "a/", "hidden": 13, "_1.jpg": 14},
    {"__key__": "odd", ".dots": 16},
    {"__key__": "end", "": 17},
    {"__key__": "a/end", "": 18},
    {"__key__": "./0002", "txt": 19, "jpg": 20},
    {"__key__": "Upper", "json": 21},
    {"__key__": "line\nbreak/1", "jpg": 22},
    {"__key__": "space in/a b", "txt": 23},
    {"__key__": "\u00fc", "t\u00e4xt": 24},
]


def rows_of(data: TarDataset) -> list[Any]:
    return [data[row] for row in range(len(data))]


def with_names(path: Path) -> Path:
    """Write members of those names, each one byte longer than the last."""
    with tarfile.open(path, "w") as tar:
        for number, name in enumerate(NAMES):
            info = tarfile.TarInfo(name)
            info.size = number
            tar.addfile(info, io.BytesIO(bytes(number)))
    return path


def test_rows_are_those_that_webdataset_finds(tmp_path: Path) -> None:
    data = TarDataset(with_names(tmp_path / "a.tar"))
    found = [{k: v if k == "__key__" else len(v) for k, v in row.items()} for row in rows_of(data)]
    assert found == FOUND


@pytest.mark.skipif(importlib.util.find_spec("webdataset") is None, reason="no webdataset")
def test_files_that_webdataset_writes_and_reads(tmp_path: Path) -> None:
    webdataset = importlib.import_module("webdataset")
    generator = np.random.default_rng(0)
    with webdataset.ShardWriter(str(tmp_path / "%03d.tar"), maxcount=7, verbose=0) as shards:
        for row in range(20):
            pixels = generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            shards.write(
                {
                    "__key__": f"some.folder/{row:04d}",
                    "png": pixels,
                    "cls": row % 3,
                    "meta.json": {"row": row},
                    "TXT": f"row {row}",
                    "npy": pixels,
                }
            )
    with_names(tmp_path / "names.tar")
    files = sorted(tmp_path.glob("*.tar"))
    assert len(files) == 4
    about = ("__url__", "__local_path__")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # its reader closes no file
        theirs = webdataset.WebDataset([str(file) for file in files], shardshuffle=False)
        expected = [{k: v for k, v in row.items() if k not in about} for row in theirs]
        del theirs
        gc.collect()
    assert rows_of(TarDataset(files)) == expected


def test_the_index_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.tar", ROWS)
    first = TarDataset(path)
    scan = tar_module._scan
    monkeypatch.setattr(tar_module, "_scan", None)  # whoever scans now fails
    again = TarDataset(path)
    assert [again[n] for n in range(25)] == [first[n] for n in range(25)]
    kept = tmp_path / ".a.tar.tar.index"
    # Damaged at any place, it is made anew.
    monkeypatch.setattr(tar_module, "_scan", scan)
    content = kept.read_bytes()
    for at in (3, 20, 50, 200, len(content) - 1):
        kept.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert TarDataset(path)[7] == first[7]
        assert kept.read_bytes() == content
    for cut in (0, 10, 60, len(content) - 1):
        kept.write_bytes(content[:cut])
        assert TarDataset(path)[7] == first[7]
    # Another file of its name has another index.
    write(path, {"b": {"txt": b"other"}})
    assert len(TarDataset(path)) == 1
    with expect_error(DataError):
        first[0]


def test_where_nothing_can_be_written_the_index_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUORATE_DATA", str(tmp_path / "cache"))
    folder = tmp_path / "read-only"
    folder.mkdir()
    path = write(folder / "a.tar", ROWS)
    (folder / ".a.tar.tar.index").mkdir()  # stands where it would be, for root too
    assert len(TarDataset(path)) == 25
    assert len(list((tmp_path / "cache/indexes").iterdir())) == 1


@pytest.mark.parametrize("at", ["a header", "data", "the end"])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, at: str) -> None:
    rows = {"a": {"x": bytes(3000)}, "b": {"x": bytes(3000)}}
    path = write(tmp_path / "a.tar", rows)
    os.truncate(path, {"a header": 3584 + 100, "data": 3584 + 900, "the end": 2 * 3584}[at])
    with expect_error(DataError) as raised:
        TarDataset(path)
    assert "\n" not in str(raised.value)
    assert "a.tar" in str(raised.value)


def test_damage_and_other_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", {"a": {"x": bytes(600)}, "b": {"x": b""}, "c": {"x": b""}})
    content = bytearray(path.read_bytes())
    content[1536 + 5] ^= 1  # in the header of b: Python's reader would end there
    path.write_bytes(content)
    with expect_error(DataError):
        TarDataset(path)
    (tmp_path / "text.tar").write_text("no tar file" * 100)
    with expect_error(DataError):
        TarDataset(tmp_path / "text.tar")
    write(tmp_path / "a.tar.gz", ROWS)
    with tarfile.open(tmp_path / "z.tar.gz", "w:gz"):
        pass
    with expect_error(DataError):
        TarDataset(tmp_path / "z.tar.gz")
    with expect_error(DataError):
        TarDataset(tmp_path / "missing.tar")
    with expect_error(DataError):
        TarDataset(tmp_path)
    with expect_error(DataError):
        TarDataset(write(tmp_path / "empty.tar", {}))


def test_links_and_members_of_one_name_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        link = tarfile.TarInfo("a.x")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with expect_error(DataError):
        TarDataset(tmp_path / "link.tar")
    with tarfile.open(tmp_path / "twice.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a.x"))
        tar.addfile(tarfile.TarInfo("a.x"))
    with expect_error(DataError):
        TarDataset(tmp_path / "twice.tar")


def test_an_error_of_decode_says_where(tmp_path: Path) -> None:
    def decode(found: Any) -> Any:
        return 1 / (found["__key__"] != "a/0003")

    path = write(tmp_path / "a.tar", ROWS)
    with pytest.raises(ZeroDivisionError) as raised:
        TarDataset(path, decode)[3]
    assert raised.value.__notes__ == [f"quorate: in {path}, a/0003 (row 3)"]


def test_a_copy_for_another_process(tmp_path: Path) -> None:
    rows = TarDataset(write(tmp_path / "a.tar", ROWS))
    again = pickle.loads(pickle.dumps(rows))
    assert again[4] == rows[4]
