"""What becomes of a run whose raylet ends, and of the files of a local cluster."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="quorate's extra ray is not installed")

from quorate.errors import UserError
from quorate.transports.ray import sweeper
from quorate.transports.ray.cluster import session_folder
from quorate.transports.ray.own_node import ProcessConnection

LISTENS = """
import socket, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
print("listens", flush=True)
while True:
    listening.accept()[0].recv(1)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path that is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="quorate-") as name:
        yield Path(name)


@contextmanager
def listening(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Have a process listen on a socket, as a raylet does."""
    words = [sys.executable, "-c", LISTENS, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_a_process_that_is_killed_is_seen_at_once(folder: Path) -> None:
    with (
        listening(folder / "raylet") as process,
        closing(ProcessConnection(str(folder / "raylet"))) as connection,
    ):
        assert not connection.has_ended()
        process.kill()
        process.wait()
        assert connection.has_ended()
        assert connection.has_ended()


def test_a_process_that_only_hangs_up_lives(folder: Path) -> None:
    with closing(socket.socket(socket.AF_INET)) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with closing(ProcessConnection(server.getsockname())) as connection:
            for _ in range(3):
                server.accept()[0].close()
                assert not connection.has_ended()
            server.accept()[0].close()
            server.close()
            assert connection.has_ended()


def test_what_was_never_reached_is_not_known_to_have_ended(folder: Path) -> None:
    with closing(ProcessConnection(str(folder / "nobody"))) as connection:
        assert not connection.has_ended()


def test_threads_that_look_at_once_agree(folder: Path) -> None:
    found: list[bool] = []
    with (
        listening(folder / "raylet") as process,
        closing(ProcessConnection(str(folder / "raylet"))) as connection,
    ):
        process.kill()
        process.wait()
        threads = [
            threading.Thread(target=lambda: found.append(connection.has_ended())) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [True] * 8


@pytest.mark.parametrize(
    ("lives", "word", "says"), [(False, "", True), (True, "", False), (False, sweeper.END, False)]
)
def test_the_sweeper_says_why_a_run_ended_without_a_word(
    folder: Path, lives: bool, word: str, says: bool
) -> None:
    (session := folder / "session").mkdir(0o700)
    (session / "ray").mkdir()
    path = folder / "raylet"
    with listening(path) as process:
        if not lives:
            process.kill()
            process.wait()
        done = subprocess.run(
            [sys.executable, "-S", sweeper.__file__, "", str(session)],
            input=f"{path}\n{word}",
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert not session.exists()
    assert done.stderr.startswith("quorate: Ray's raylet on this machine has ended") == says
    assert done.stderr.count("\n") == says


def test_the_folder_of_a_local_cluster_is_the_users_alone_and_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    with session_folder() as name:
        assert Path(name).parent == folder
        assert stat.S_IMODE(Path(name).stat().st_mode) == 0o700
        Path(name, "ray").mkdir()
    assert not list(folder.iterdir())


def test_sockets_of_a_local_cluster_have_short_paths(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := folder / ("x" * 80)).mkdir()
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(long))  # as TMPDIR would
    with session_folder() as name:
        assert not name.startswith(str(long))
    for wrong in (long, folder / "nowhere"):
        monkeypatch.setenv("RAY_TMPDIR", str(wrong))
        with pytest.raises(UserError, match="RAY_TMPDIR"), session_folder():
            pass
