"""Tar, text and TFRecord files: any row by number, and indexes kept after the first use."""

import io
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.forgery.index import forge_index
from support.messages import expect_error

from quorate.data.streams import LinesDataset, TarDataset
from quorate.data.tfrecord import TFRecordDataset, write_records
from quorate.data.tokens import Tokens, write_tokens
from quorate.errors import DataError

FORGERIES = int(os.environ.get("QUORATE_TEST_FORGERIES", "12"))  # of each kind
KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a.tar": (".a.tar.tar.index", TarDataset),
    "a.jsonl": (".a.jsonl.text.index", lambda paths: LinesDataset(paths, bytes)),
    "a.tfrecord": (".a.tfrecord.index", lambda paths: TFRecordDataset(paths, bytes)),
}


def write(path: Path, numbers: range) -> Path:
    """Write a file of the kind given by its name, with a row for each number."""
    if path.suffix == ".tar":
        with tarfile.open(path, "w") as tar:
            for number in numbers:
                for part in (0, 1):
                    info = tarfile.TarInfo(f"a/{number}.{part}")
                    info.size = number + part
                    tar.addfile(info, io.BytesIO(bytes(number + part)))
    elif path.suffix == ".jsonl":
        path.write_bytes(b"".join(b"[%d]\r\n\r\n" % number for number in numbers))
    else:
        write_records(path, [b"record %d" % number for number in numbers])
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each kind, of 25 rows."""
    folder = tmp_path_factory.mktemp("sound")
    for name, (_, opened) in KINDS.items():
        opened(write(folder / name, range(25)))
    return folder


@pytest.fixture
def copied(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUORATE_DATA", str(tmp_path / "cache"))
    shutil.copytree(sound, tmp_path / "data")
    return tmp_path / "data"


def rows_of(data: Any) -> list[Any]:
    return [data[row] for row in range(len(data))]


@pytest.mark.parametrize("name", KINDS)
def test_any_row_of_several_files_by_its_number(name: str, copied: Path) -> None:
    opened = KINDS[name][1]
    empty, more = (copied / f"{numbers}{Path(name).suffix}" for numbers in ("no", "more"))
    rows = opened([copied / name, write(empty, range(0)), write(more, range(90, 93))])
    every = rows_of(opened(copied / name)) + rows_of(opened(more))
    some = [27, 0, 3, 25, 3]
    assert (len(rows), rows[-1], rows.__getitems__([])) == (28, every[-1], [])
    assert rows.__getitems__(some) == [every[row] for row in some]
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(rows.__getitem__, range(28))] == every
    assert rows_of(pickle.loads(pickle.dumps(rows))) == every
    for row in (28, -29):
        with pytest.raises(IndexError, match="of 28"):
            rows[row]
    for of in ([0, 28], [-1, 0]):
        with pytest.raises(IndexError, match="of 28"):
            rows.__getitems__(of)
    os.mkfifo(copied / "pipe")  # opening the pipe for reading would wait for ever
    for refused in (empty, copied / "missing", copied, copied / "pipe", []):
        with expect_error(DataError):
            opened(refused)


@pytest.mark.parametrize("name", KINDS)
def test_an_index_is_made_once_and_anew_when_it_is_damaged_or_of_another_file(
    name: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, opened = KINDS[name]
    path, place = copied / name, copied / kept
    stat, content, good = path.stat(), path.read_bytes(), place.read_bytes()
    rows = rows_of(opened(path))
    # A file with the same size and time, but without any row: noticed when an index is made.
    path.write_bytes(bytes(len(content)))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    zeros = opened(path)
    assert len(zeros) == len(rows)
    if name == "a.tfrecord":  # whose records have checksums
        with expect_error(DataError):
            zeros[3]
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with monkeypatch.context() as patch:  # whatever the name of the path
        patch.chdir(copied)
        assert rows_of(opened(Path(name))) == rows
    places = range(0, len(good), max(3, len(good) // 50))
    flipped = [good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :] for at in places]
    for damaged in (b"", good[:20], good[:-1], good + b"!", *flipped):
        place.write_bytes(damaged)
        assert opened(path)[7] == rows[7]
        assert place.read_bytes() == good
    shorter = opened(path)
    path.write_bytes(content[: len(content) // 2])
    with expect_error(DataError):
        shorter[0]
    path.unlink()
    with expect_error(DataError):
        shorter[0]
    path.write_bytes(content)
    assert rows_of(opened(path)) == rows
    left = {each.name for each in copied.iterdir()} - set(KINDS)
    assert left == {hidden for hidden, _ in KINDS.values()}  # no temporary file


@pytest.mark.parametrize("name", ["a.tar", "a.tfrecord"])
def test_where_nothing_can_be_written_an_index_is_elsewhere_or_nowhere(
    name: str, copied: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept, opened = KINDS[name]
    rows = rows_of(opened(copied / name))
    (copied / kept).unlink()
    (copied / kept).mkdir()  # nothing can be written there, even by root
    for _ in range(2):
        assert rows_of(opened(copied / name)) == rows
        assert len(list((copied.with_name("cache") / "indexes").iterdir())) == 1
    assert "cannot be saved" not in caplog.text
    monkeypatch.setenv("QUORATE_DATA", str(copied / "a.tar"))  # nor there
    assert rows_of(opened(copied / name)) == rows
    assert "cannot be saved" in caplog.text


@pytest.mark.parametrize("name", KINDS)
def test_a_forged_index_is_made_anew(name: str, copied: Path) -> None:
    """Accept a forged index only with rows of a file of this size: rows are read, or refused."""
    kept, opened = KINDS[name]
    path, place = copied / name, copied / kept
    content, rows = place.read_bytes(), rows_of(opened(path))
    anew = 0
    for number in range(FORGERIES):
        done = forge_index(place, number)
        is_anew = False
        try:
            found = opened(path)
            is_anew = (place.is_file() and place.read_bytes() == content) or (
                place.is_dir() and bool([*copied.with_name("cache").rglob("*.index")])
            )
            read = rows_of(found)
        except DataError as caught:
            said = str(caught)
        else:
            said = ""
            assert read == rows or not is_anew, (number, done)
        assert said.isprintable(), (number, done)
        assert not (said and is_anew), (number, done, said)
        anew += is_anew
        for left in copied.iterdir():
            if left.name not in KINDS and left.name not in (k for k, _ in KINDS.values()):
                left.unlink()
        shutil.rmtree(copied.with_name("cache"), ignore_errors=True)
        if place.is_dir() and not place.is_symlink():
            place.rmdir()
        place.unlink(missing_ok=True)
        place.write_bytes(content)
    assert anew >= FORGERIES * 0.7


@pytest.mark.parametrize("name", [*KINDS, "a.tokens"])
def test_a_file_that_is_cut_while_it_is_read_ends_no_process(name: str, copied: Path) -> None:
    """A mapped file would end the process by SIGBUS: the test reads in a fork, to survive."""
    path = copied / name
    if name == "a.tokens":
        write_tokens(path, [[n] * 2000 for n in range(25)])
    kept, opened = KINDS.get(name, ("", Tokens))
    found = opened(path)
    rows = rows_of(found)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if kept:  # the rows are where they were, wherever the index is
                os.truncate(copied / kept, 0)
                assert rows_of(found) == rows
            for size in (path.stat().st_size // 3, 0):
                os.truncate(path, size)
                with pytest.raises(DataError):
                    found[len(found) - 1]
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
