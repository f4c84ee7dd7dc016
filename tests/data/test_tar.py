"""Tar files: any row by number, a kept index, cut or damaged files."""

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support.messages import expect_error

from quorate.data.streams import TarDataset
from quorate.errors import DataError

ROWS = {f"a/{n:04d}": {"txt": f"row {n}".encode(), "cls": b"%d" % (n % 3)} for n in range(25)}


def write(path: Path, rows: dict[str, dict[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for key, members in rows.items():
            for kind, content in members.items():
                info = tarfile.TarInfo(f"{key}.{kind}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_rows_in_each_layout_of_names(tmp_path: Path, layout: int) -> None:
    name = "folder/" * 14 + "x" * 80 * (layout != tarfile.USTAR_FORMAT)
    given = ROWS | {f"{name}{n}": {"seg.png": b"\0" * n} for n in range(3)}
    path = write(tmp_path / "0.tar", given, format=layout)
    assert rows_of(TarDataset(path)) == [{"__key__": key} | of for key, of in given.items()]
    decoded = TarDataset(path, decode=lambda found: 1 / (int(found["cls"]) - 1))
    assert decoded[2] == 1.0
    with pytest.raises(ZeroDivisionError) as raised:
        decoded[4]
    assert raised.value.__notes__ == [f"quorate: in {path}, a/0004 (row 4)"]


NAMES = (
    *("0001.jpg", "0001.CLS", "0001.seg.png", "a.b/0001.jpg", "a.b/0001.txt", "a/b/x.y.z"),
    *("0001.jpg", "README", "a/README", "__info__/about.json", "__info__.json", ".hidden", "._0.x"),
    *("a/.hidden", "a/._1.jpg", "b.c/.x", "odd..dots", "end.", "a/end.", "./0002.txt"),
    *("./0002.Jpg",),
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
    """Write members of all names, each a byte longer than the last."""
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
    rows = {"a": {"x": bytes(600)}, "b": {"x": b""}, "c": {"x": b""}}
    content = bytearray(write(tmp_path / "a.tar", rows).read_bytes())
    content[1536 + 5] ^= 1  # in the header of b: Python's reader would end there
    (tmp_path / "a.tar").write_bytes(content)
    (tmp_path / "text.tar").write_text("no tar file" * 100)
    with tarfile.open(tmp_path / "z.tar.gz", "w:gz"):
        pass
    link = tarfile.TarInfo("a.x")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    for name, members in (("link", [link]), ("twice", [tarfile.TarInfo("a.x")] * 2)):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for member in members:
                tar.addfile(member)
    for name in ("a.tar", "text.tar", "z.tar.gz", "link.tar", "twice.tar"):
        with expect_error(DataError):
            TarDataset(tmp_path / name)
