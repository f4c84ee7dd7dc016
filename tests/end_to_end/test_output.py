"""Closed, full or broken output, at any moment: the same bits, code 0, no traceback."""

import fcntl
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.references import References
from support.runs import LIMIT_S, command, digests
from support.warm import WARM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full"),
]

STEPS = 60
UPDATES = f"updates={STEPS}"
PROCESSES = ("--engine", "processes", "--workers", "2")
STAGES = ("--devices", "cpu+cpu", "--split", "2")


def read_until(pipe: int, most: int) -> None:
    """Read so many bytes, if there are as many, and no more."""
    while most > 0 and (part := os.read(pipe, min(most, 4096))):
        most -= len(part)


def run_spoiled(kind: str, engine: str, run_dir: Path, chance: random.Random) -> tuple[int, bytes]:
    """Run to the end with an output spoiled on the way; return exit code and error output."""
    options = ("--engine", engine, "--workers", "2", "--run-dir", str(run_dir))
    full = ["speaks=stdout,stderr", f"full={chance.randrange(STEPS)}"]
    words = full if kind == "full" else ["speaks=stdout"]
    line = command("lasting.py", UPDATES, *words, options=options)
    read, write = os.pipe()
    if kind == "slow":  # nobody waits for a reader who does not read
        fcntl.fcntl(write, fcntl.F_SETFL, fcntl.fcntl(write, fcntl.F_GETFL) | os.O_NONBLOCK)
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    errors_file = run_dir.with_suffix(".errors")
    with errors_file.open("wb") as errors:
        outputs = (write, write if kind == "full" else errors.fileno())
        process = WARM.start(line[3:], os.environ, outputs=outputs)
    os.close(write)
    try:
        read_until(read, sys.maxsize if kind == "full" else chance.randrange(30_000))
        if kind == "broken":
            os.close(read)
            read = -1
        return process.wait(LIMIT_S), errors_file.read_bytes()
    finally:
        process.kill()
        process.wait()
        if read >= 0:
            os.close(read)


@pytest.mark.parametrize(
    ("kind", "engine"), [("broken", "towers"), ("slow", "processes"), ("full", "processes")]
)
def test_output_that_is_lost_at_any_moment_ends_no_run(
    kind: str, engine: str, tmp_path: Path, references: References
) -> None:
    run_dir = tmp_path / "run"
    code, errors = run_spoiled(kind, engine, run_dir, random.Random(kind))
    assert code == 0, errors.decode()
    assert not [line for line in errors.splitlines() if not line.startswith(b"a loss")], errors
    assert digests(run_dir) == references.on_a_tower("lasting.py", UPDATES).digests
    if kind == "slow" and not (run_dir / "display.txt").exists():
        return  # the coordinator ended before its workers had filled the pipe
    (note,) = (run_dir / "display.txt").read_text().splitlines()
    assert "standard output: " in note
    assert note.endswith("nothing more is shown, training continues")


@pytest.mark.parametrize(
    ("engine", "closed"),
    # Forks and pipes between processes meet most closed streams; a daemon has none of the three.
    [(PROCESSES, ">&-"), (PROCESSES, "<&- >&- 2>&-"), (STAGES, "<&- >&-")],
    ids=["output", "all", "both of stages"],
)
def test_a_run_that_is_started_with_closed_descriptors_ends_as_any_other(
    engine: tuple[str, ...], closed: str, tmp_path: Path, references: References
) -> None:
    run_dir = tmp_path / "run"
    options = (*engine, "--run-dir", str(run_dir))
    line = command("lasting.py", UPDATES, "speaks=stdout", options=options)
    redirected = ["sh", "-c", f'exec "$@" {closed}', "sh", *line]
    ended = subprocess.run(redirected, capture_output=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == b""
    assert b"Traceback" not in ended.stdout
    assert b"started again" not in ended.stdout
    assert digests(run_dir) == references.on_a_tower("lasting.py", UPDATES).digests
