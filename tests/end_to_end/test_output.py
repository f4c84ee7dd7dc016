"""Output that is closed, full or broken, at any moment: the same bits, exit code 0, no traceback.

QUORATE_TEST_MOMENTS says how many moments are tried (5), and QUORATE_TEST_CLOSED=all has every
combination of closed descriptors be tried on every local engine.
"""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.references import References
from support.runs import LIMIT_S, SCRIPTS, command, digests

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full")

MOMENTS = int(os.environ.get("QUORATE_TEST_MOMENTS", "5"))
KINDS = ("broken", "slow", "closed", "full", "none")
STEPS = 60

TOWERS, PROCESSES = ("--engine", "towers"), ("--engine", "processes")
ENGINES = {
    "inline": (*TOWERS, "--workers", "1"),
    "towers": (*TOWERS, "--workers", "2"),
    "processes": (*PROCESSES, "--workers", "2"),
    "stages": ("--devices", "cpu+cpu", "--split", "2"),
}
CLOSED = (">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&-", "<&- 2>&-", "<&- >&- 2>&-")
# Forks and pipes between processes meet most of what is closed.
SOME_CLOSED = [("processes", ">&-"), ("processes", "2>&-"), ("stages", "<&- >&-")]
ALL_CLOSED = [(engine, closed) for engine in ENGINES for closed in CLOSED]


def words(engine: str, run_dir: Path, *arguments: str) -> list[str]:
    options = ("--engine", engine, "--workers", "2", "--run-dir", str(run_dir))
    return command("spoken.py", *arguments, options=options)


def read_until(pipe: int, most: int) -> None:
    """Read so many bytes, if there are as many, and no more."""
    while most > 0 and (part := os.read(pipe, min(most, 4096))):
        most -= len(part)


def run_spoiled(kind: str, engine: str, run_dir: Path, chance: random.Random) -> tuple[int, bytes]:
    """Run to the end with an output that is spoiled on the way; its exit code, and its errors."""
    both = ["both"] if chance.random() < 0.5 else []
    step = chance.randrange(STEPS)
    how = kind if kind in ("closed", "full") else "left"
    line = words(engine, run_dir, how, str(step), *both)
    errors_file = run_dir.with_suffix(".errors")
    if kind == "none":  # a daemon has neither input nor output
        redirected = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *line]
        return subprocess.run(redirected, timeout=LIMIT_S).returncode, b""
    read, write = os.pipe()
    if kind == "slow":  # nobody waits for whoever does not read
        fcntl.fcntl(write, fcntl.F_SETFL, fcntl.fcntl(write, fcntl.F_GETFL) | os.O_NONBLOCK)
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    with errors_file.open("wb") as errors:
        process = subprocess.Popen(line, stdout=write, stderr=write if both else errors)
    os.close(write)
    try:
        if kind in ("broken", "slow"):
            read_until(read, chance.randrange(30_000))
        if kind == "broken":
            os.close(read)
            read = -1
        if how != "left":
            read_until(read, sys.maxsize)
        return process.wait(LIMIT_S), errors_file.read_bytes()
    finally:
        process.kill()
        process.wait()
        if read >= 0:
            os.close(read)


def check(
    kind: str, engine: str, folder: Path, references: References, chance: random.Random
) -> None:
    run_dir = folder / f"{kind}-{engine}"
    code, errors = run_spoiled(kind, engine, run_dir, chance)
    assert code == 0, errors.decode()
    assert not [line for line in errors.splitlines() if not line.startswith(b"a loss")], errors
    expected = references.on_a_tower("spoken.py", "left", "0").digests
    assert digests(run_dir) == expected
    if kind == "slow" and not (run_dir / "display.txt").exists():
        return  # the coordinator was done before its workers had filled the pipe
    (note,) = (run_dir / "display.txt").read_text().splitlines()
    assert "standard output: " in note
    assert note.endswith("nothing more is shown, training continues")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "engine"), [("broken", "towers"), ("full", "processes")])
def test_output_that_breaks_or_is_full_ends_no_run(
    kind: str, engine: str, tmp_path: Path, references: References
) -> None:
    check(kind, engine, tmp_path, references, random.Random(0))


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(MOMENTS))
def test_output_that_is_lost_at_any_moment_ends_no_run(
    moment: int, tmp_path: Path, references: References
) -> None:
    chance = random.Random(moment)
    engine = ("towers", "processes")[moment // len(KINDS) % 2 ^ moment % 2]
    check(KINDS[moment % len(KINDS)], engine, tmp_path, references, chance)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(2))
def test_a_plain_script_whose_reader_leaves_ends_with_0(moment: int, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    text = (
        (SCRIPTS / "spoken.py")
        .read_text()
        .replace("shards=4,", f"shards=4, run_dir={str(tmp_path)!r},")
    )
    script.write_text(text)
    line = [sys.executable, str(script), "left", "0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        read_until(process.stdout.fileno(), (1, 20_000)[moment])
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(LIMIT_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "closed"),
    ALL_CLOSED if os.environ.get("QUORATE_TEST_CLOSED") == "all" else SOME_CLOSED,
)
def test_a_run_that_is_started_with_closed_descriptors_ends_as_any_other(
    engine: str, closed: str, tmp_path: Path, references: References
) -> None:
    run_dir = tmp_path / "run"
    options = (*ENGINES[engine], "--run-dir", str(run_dir))
    line = command("spoken.py", "left", str(STEPS), options=options)
    redirected = ["sh", "-c", f'exec "$@" {closed}', "sh", *line]
    ended = subprocess.run(redirected, capture_output=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert b"Traceback" not in ended.stderr + ended.stdout
    assert ended.stderr == b""
    assert b"started again" not in ended.stdout
    assert digests(run_dir) == references.on_a_tower("spoken.py", "left", "0").digests
