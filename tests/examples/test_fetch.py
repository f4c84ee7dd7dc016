"""Fetching: verification, cache, fallback and messages, with real files and real commands."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from open_data import fashion_mnist
from open_data.fetch import fetch
from open_data.sources import File, Source
from open_data.sources.debian_package import DebianPackage
from open_data.sources.https import Https

from quorate.errors import DataError, SettingError

CONTENTS = {"a.bin": b"first" * 1000, "b.bin": b"second" * 3000}
FILES = [File(name, hashlib.sha256(data).hexdigest()) for name, data in CONTENTS.items()]
HINT = "into a folder, and name it"


class Shelf:
    """A source that copies from a directory."""

    def __init__(self, folder: Path, title: str = "the shelf") -> None:
        self.folder = folder
        self.title = title
        self.asked: list[list[str]] = []

    def get(self, files: Sequence[File], into: Path) -> None:
        self.asked.append([file.name for file in files])
        for file in files:
            shutil.copy(self.folder / file.name, into / file.name)


class Bench:
    """A cache, a good shelf, and what was said."""

    def __init__(self, tmp_path: Path) -> None:
        self.cache = tmp_path / "user" / "cache" / "set"
        self.said: list[str] = []
        self.good = self.shelf("good", CONTENTS)

    def shelf(self, name: str, contents: dict[str, bytes]) -> Shelf:
        folder = self.cache.parents[2] / name
        folder.mkdir()
        for file, data in contents.items():
            (folder / file).write_bytes(data)
        return Shelf(folder, name)

    def fetch(self, *sources: Source) -> Path:
        return fetch(
            "A set",
            FILES,
            sources,
            cache=self.cache,
            licence="MIT",
            hint=HINT,
            say=self.said.append,
        )

    def check(self) -> None:
        """The cache holds the true files, and nothing else lies in it or beside it."""
        assert {path.name: path.read_bytes() for path in self.cache.iterdir()} == CONTENTS
        assert list(self.cache.parent.iterdir()) == [self.cache]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_first_call_fetches_second_does_not(bench: Bench) -> None:
    assert bench.fetch(bench.good) == bench.cache
    assert bench.said == [
        f"A set: 2 files, 0.0 MB, from good, cached in {bench.cache}; licence: MIT"
    ]
    assert bench.fetch(bench.good) == bench.cache
    assert len(bench.said) == 1
    assert bench.good.asked == [["a.bin", "b.bin"]]
    bench.check()


@pytest.mark.parametrize("damage", [b"", CONTENTS["b.bin"][:-1], b"!" + CONTENTS["b.bin"][1:]])
def test_a_damaged_cached_file_is_said_and_fetched_again(bench: Bench, damage: bytes) -> None:
    bench.fetch(bench.good)
    (bench.cache / "b.bin").write_bytes(damage)
    bench.fetch(bench.good)
    assert str(bench.cache / "b.bin") in bench.said[1]
    assert "damaged" in bench.said[1]
    assert "1 file," in bench.said[2]
    assert bench.good.asked[1:] == [["b.bin"]]
    bench.check()


def test_sources_in_turn(bench: Bench, tmp_path: Path) -> None:
    absent = Shelf(tmp_path / "nowhere", "absent")
    wrong = bench.shelf("wrong", {**CONTENTS, "b.bin": b"another"})
    half = bench.shelf("half", {"a.bin": CONTENTS["a.bin"]})
    bench.fetch(absent, wrong, half, bench.good)
    assert len(bench.said) == 1
    assert "from good" in bench.said[0]
    bench.check()


def test_no_source_works(bench: Bench, tmp_path: Path) -> None:
    absent = Shelf(tmp_path / "nowhere", "absent")
    wrong = bench.shelf("wrong", {**CONTENTS, "b.bin": b"another"})
    with pytest.raises(DataError) as caught:
        bench.fetch(absent, wrong)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("A set: got nothing from any source (absent: [Errno 2] No such file")
    assert f"wrong: b.bin: got SHA-256 {hashlib.sha256(b'another').hexdigest()}" in message
    assert FILES[1].sha256 in message
    assert message.endswith("put a.bin, b.bin into a folder, and name it")
    assert bench.said == []
    assert not list(bench.cache.iterdir())
    assert list(bench.cache.parent.iterdir()) == [bench.cache]


def test_a_good_cached_file_survives_a_failed_fetch(bench: Bench, tmp_path: Path) -> None:
    bench.fetch(bench.good)
    (bench.cache / "b.bin").unlink()
    with pytest.raises(DataError, match="nothing from any source"):
        bench.fetch(Shelf(tmp_path / "nowhere"))
    assert (bench.cache / "a.bin").read_bytes() == CONTENTS["a.bin"]


def test_an_unusable_cache(bench: Bench) -> None:
    bench.cache.parent.mkdir(parents=True)
    bench.cache.write_text("a file where the directory should be")
    with pytest.raises(DataError, match="QUORATE_DATA") as caught:
        bench.fetch(bench.good)
    assert str(bench.cache) in str(caught.value)


def test_two_at_once(bench: Bench) -> None:
    both = threading.Barrier(2, timeout=60)

    class Slow(Shelf):
        def get(self, files: Sequence[File], into: Path) -> None:
            both.wait()  # both found the cache empty
            super().get(files, into)
            both.wait()

    failures: list[BaseException] = []

    def one() -> None:
        try:
            bench.fetch(Slow(bench.good.folder))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert len(bench.said) == 2
    bench.check()


def test_https_only() -> None:
    for url in ("http://example.org/a", "file:///etc/passwd", "ftp://example.org/a"):
        with pytest.raises(SettingError, match="https"):
            Https({"a.bin": url})


def test_https_that_nobody_answers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    dead = Https({file.name: f"https://127.0.0.1:9/{file.name}" for file in FILES})
    with pytest.raises(
        DataError, match=r"HTTPS: https://127\.0\.0\.1:9/a\.bin: got .*, expected an"
    ):
        bench.fetch(dead)
    bench.fetch(dead, bench.good)
    bench.check()


# A Debian archive of our own: the real apt-get and dpkg, with no network and no root needed.

debian = pytest.mark.skipif(
    not all(map(shutil.which, ("apt-get", "dpkg", "dpkg-deb"))), reason="no Debian tools here"
)


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that apt knows as its only archive, with no package lists fetched yet."""
    folder = tmp_path / "archive"
    folder.mkdir()
    (folder / "Packages").touch()
    (tmp_path / "sources.list").write_text(f"deb [trusted=yes] file:{folder} ./\n")
    (tmp_path / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{tmp_path}/sources.list";\n'
        'Dir::Etc::sourceparts "-";\n'
        f'Dir::State::Lists "{tmp_path}/lists";\n'
        f'Dir::Cache "{tmp_path}/apt";\n'
    )
    for name in ("lists/partial", "apt/archives/partial"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    return folder


def publish(archive: Path) -> None:
    """Put a package with both files, one of them compressed, into the archive."""
    tree = archive.parent / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr/share/set").mkdir(parents=True)
    control = (
        "Package: quorate-test-set\nVersion: 1\nArchitecture: all\n"
        "Maintainer: Nobody <nobody@example.org>\nDescription: two files\n"
    )
    (tree / "DEBIAN/control").write_text(control)
    (tree / "usr/share/set/a.bin").write_bytes(CONTENTS["a.bin"])
    (tree / "usr/share/set/b.bin.gz").write_bytes(gzip.compress(CONTENTS["b.bin"]))
    deb = archive / "set.deb"
    subprocess.run(["dpkg-deb", "-b", tree, deb], check=True, capture_output=True)
    data = deb.read_bytes()
    (archive / "Packages").write_text(
        f"{control}Filename: ./set.deb\nSize: {len(data)}\n"
        f"SHA256: {hashlib.sha256(data).hexdigest()}\n\n"
    )


PACKAGE = DebianPackage(
    "quorate-test-set", {"a.bin": "usr/share/set/a.bin", "b.bin": "usr/share/set/b.bin.gz"}
)


@debian
def test_debian_package_without_lists(bench: Bench, archive: Path) -> None:
    publish(archive)
    bench.fetch(PACKAGE)
    assert "from the Debian package quorate-test-set" in bench.said[0]
    assert not list((archive.parent / "lists").glob("*Packages*"))  # the machine's were left alone
    bench.check()


@debian
def test_debian_package_with_lists(bench: Bench, archive: Path) -> None:
    publish(archive)
    subprocess.run(
        ["apt-get", "-o", "APT::Sandbox::User=root", "update"], check=True, capture_output=True
    )
    assert list((archive.parent / "lists").glob("*Packages*"))
    bench.fetch(PACKAGE)
    bench.check()


@debian
def test_debian_package_that_lacks_a_file(bench: Bench, archive: Path) -> None:
    publish(archive)
    elsewhere = DebianPackage(PACKAGE.package, {**PACKAGE.paths, "b.bin": "usr/share/b.bin"})
    with pytest.raises(DataError, match=r"No such file.*usr/share/b\.bin"):
        bench.fetch(elsewhere)


@debian
def test_debian_package_that_does_not_exist(bench: Bench, archive: Path) -> None:
    with pytest.raises(DataError, match="Unable to locate package quorate-test-set") as caught:
        bench.fetch(PACKAGE)
    assert "\n" not in str(caught.value)
    assert "the Debian package quorate-test-set" in str(caught.value)


def test_debian_package_without_debian(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="no command apt-get"):
        bench.fetch(PACKAGE)


def test_a_command_that_takes_too_long(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apt-get").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(DataError, match=r"no end of apt-get after 0\.2 s"):
        bench.fetch(DebianPackage("p", PACKAGE.paths, timeout_s=0.2))


# Fashion-MNIST from a folder of the user's own.


def images(count: int, side: int = 3) -> bytes:
    return struct.pack(">4B3I", 0, 0, 8, 3, count, side, side) + bytes(range(count * side * side))


def labels(*values: int) -> bytes:
    return struct.pack(">4BI", 0, 0, 8, 1, len(values)) + bytes(values)


Write = Callable[..., Path]


@pytest.fixture
def own(tmp_path: Path) -> Write:
    """Writes a folder of four files; keywords replace contents, None leaves a file out."""

    def write(**changes: bytes | None) -> Path:
        contents: dict[str, bytes | None] = {
            "train_images": images(4),
            "train_labels": labels(9, 0, 3, 1),
            "t10k_images": gzip.compress(images(2)),
            "t10k_labels": labels(5, 6),
            **changes,
        }
        for key, data in contents.items():
            kind = "idx3" if "images" in key else "idx1"
            suffix = ".gz" if data and data[:1] == b"\x1f" else ""
            if data is not None:
                (tmp_path / f"{key.replace('_', '-')}-{kind}-ubyte{suffix}").write_bytes(data)
        return tmp_path

    return write


def test_fashion_mnist_from_a_folder(own: Write) -> None:
    folder = own()
    before = sorted(folder.iterdir())
    train, test = fashion_mnist.load(folder, say=pytest.fail)
    assert [tuple(t.shape) for t in train.tensors] == [(4, 1, 3, 3), (4,)]
    assert [t.dtype for t in train.tensors] == [torch.uint8, torch.int64]
    assert train.tensors[1].tolist() == [9, 0, 3, 1]
    assert test.tensors[0].flatten().tolist() == list(range(18))
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"train_labels": None}, "no file train-labels-idx1-ubyte"),
        ({"train_labels": labels(1, 2, 3)}, "got 3 labels, expected 4"),
        ({"t10k_labels": labels(1, 10)}, "t10k-labels-idx1-ubyte: got label 10 in row 1"),
        ({"t10k_labels": images(2)}, r"got uint8 \(2, 3, 3\), expected whole numbers"),
        ({"train_images": labels(1, 2)}, r"got uint8 \(2,\), expected uint8 images"),
        ({"train_images": images(4)[:-1]}, "train-images-idx3-ubyte at byte 51: got the end"),
    ],
)
def test_fashion_mnist_from_a_wrong_folder(
    own: Write, change: dict[str, bytes | None], told: str
) -> None:
    with pytest.raises(DataError, match=told):
        fashion_mnist.load(own(**change))


def test_fashion_mnist_from_the_cache_is_held_to_its_checksums(
    own: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "data" / "fashion-mnist"
    cache.parent.mkdir()
    shutil.copytree(own(), cache, ignore=lambda *_: ["data"])
    monkeypatch.setenv("QUORATE_DATA", str(cache.parent))
    monkeypatch.setattr(fashion_mnist, "SOURCES", ())
    said: list[str] = []
    with pytest.raises(DataError, match=r"Fashion-MNIST: got nothing .* name that folder"):
        fashion_mnist.load(say=said.append)
    assert len(said) == 3
    assert all("damaged" in line for line in said)
