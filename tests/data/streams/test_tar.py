"""Tar files: any row by its number, an index that is kept, files that are cut or damaged."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

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
    assert [rows[0], rows[1]] == [
        {"__key__": "some/\udcff", "x.y": b"1"},
        {"__key__": "plain", "": b""},
    ]


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
    with pytest.raises(DataError, match="a file that was changed since it was indexed"):
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
    with pytest.raises(DataError, match="the file was cut") as raised:
        TarDataset(path)
    assert "\n" not in str(raised.value)
    assert "a.tar" in str(raised.value)


def test_damage_and_other_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", {"a": {"x": bytes(600)}, "b": {"x": b""}, "c": {"x": b""}})
    content = bytearray(path.read_bytes())
    content[1536 + 5] ^= 1  # in the header of b: Python's reader would end there
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"at byte 1,536: got a damaged header, or"):
        TarDataset(path)
    (tmp_path / "text.tar").write_text("no tar file" * 100)
    with pytest.raises(DataError, match="got no tar file"):
        TarDataset(tmp_path / "text.tar")
    write(tmp_path / "a.tar.gz", ROWS)
    with tarfile.open(tmp_path / "z.tar.gz", "w:gz"):
        pass
    with pytest.raises(DataError, match="a gzip-compressed file, in which no row can be found"):
        TarDataset(tmp_path / "z.tar.gz")
    with pytest.raises(DataError, match="no such file"):
        TarDataset(tmp_path / "missing.tar")
    with pytest.raises(DataError, match="a directory, where a regular file is expected"):
        TarDataset(tmp_path)
    with pytest.raises(DataError, match="no row"):
        TarDataset(write(tmp_path / "empty.tar", {}))


def test_links_and_members_of_one_name_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        link = tarfile.TarInfo("a.x")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(DataError, match="got a link, or another kind of member, expected a file"):
        TarDataset(tmp_path / "link.tar")
    with tarfile.open(tmp_path / "twice.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a.x"))
        tar.addfile(tarfile.TarInfo("a.x"))
    with pytest.raises(DataError, match="a second member of this name"):
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
