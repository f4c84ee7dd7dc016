"""The start of worker processes: forked by a server on standby or a later server, or spawned.

Processes of each kind are alike, run a script up to its first loop, and no further.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fits import fit
from support.messages import expect_error
from support.references import References
from support.runs import LIMIT_S, SCRIPTS, command, last_json, run

import quorate
from quorate.errors import SettingError

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")

MAIN = "from quorate.__main__ import main\nsys.exit(main())"
# How the command comes into its process: Python's differences there.
STARTS = {
    "standby": ["-m", "quorate"],
    # torch is imported already, and forks are no servers: workers are forks of a new interpreter.
    "later": ["-c", f"import sys, torch\n{MAIN}"],
    "spawned": ["-c", f"import os, sys\ndel os.pidfd_open\n{MAIN}"],
    # The server is a fork; the first forks of the server fail.
    "failing": [
        "-c",
        "import errno, itertools, os, sys\n"
        "fork, calls = os.fork, itertools.count()\n"
        "def failing():\n"
        "    if next(calls) in (1, 2):\n"
        "        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
        "    return fork()\n"
        f"os.fork = failing\n{MAIN}",
    ],
}


class Started:
    """A run of ``second_loop.py``, from nothing."""

    def __init__(self, folder: Path, how: str, *options: str) -> None:
        folder.mkdir()
        words = [*STARTS[how], "run", "--devices", "cpu", *options]
        ended = subprocess.run(
            [sys.executable, *words, str(SCRIPTS / "second_loop.py"), str(folder)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        self.out = ended.stdout
        self.printed: dict[str, Any] = last_json(self.out)
        self.workers = [json.loads(file.read_text()) for file in folder.glob("about-*.json")]
        self.notes = (folder / "notes").read_text().splitlines()


@pytest.mark.slow
def test_workers_are_alike_and_run_the_script_up_to_its_first_loop(
    tmp_path: Path, references: References
) -> None:
    runs = {how: Started(tmp_path / how, how, "--workers", "2") for how in STARTS}
    expected = references.on_a_tower("second_loop.py", str(tmp_path)).json["values"]
    for how, started in runs.items():
        # Evaluation after the loop uses trained weights, and other data are computed on towers.
        assert started.printed["values"] == expected, how
        assert started.notes == [*["before"] * 3, "after fit", "finally", "at exit"], how
        first, second = started.out.split("other data\n")
        assert "towers" not in first
        assert "towers (threads), because worker processes compute only the first" in second
        # The coordinator's environment, as the script has changed the environment.
        own = [each.pop("the script's own") for each in started.workers]
        assert own == [started.printed["the script's own"]] * 2
    for how, started in runs.items():
        dies = ["dies_with_parent.py" in " ".join(w.pop("command")) for w in started.workers]
        assert how == "failing" or dies == [how != "standby"] * 2
    # The worker's end of the wire and its output: nothing of the fork server, or of other workers.
    alike = runs["later"].workers[0]
    assert alike["held"].count("socket") == 1
    assert (alike["tasks"], alike["leads its group"]) == (1, True)
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1} <= set(alike["not obeyed"])
    assert alike["input"] == os.devnull
    for how, started in runs.items():
        assert [{**alike, "tasks": each["tasks"]} for each in started.workers] == started.workers
        assert how == "spawned" or all(each["tasks"] == 1 for each in started.workers)
    children = {how: started.printed["children"] for how, started in runs.items()}
    assert children == {"standby": 1, "later": 0, "spawned": 0, "failing": 1}
    why = "cannot be started: [Errno 11] Resource temporarily unavailable; another is starting"
    assert runs["failing"].out.count(why) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "needs"),
    [((), "2 workers need 22,"), (("--engine", "collective"), "2 ranks need ")],
)
def test_too_few_descriptors_are_refused_with_both_figures(
    options: tuple[str, ...], needs: str
) -> None:
    words = command("second_loop.py", "/", options=(*options, "--workers", "2"))
    ended = run(["sh", "-c", 'ulimit -n 30; exec "$@"', "sh", *words])
    assert ended.code == 2, ended.said
    line = ended.err.splitlines()[-1]
    assert line.startswith(f"quorate: descriptors: {needs}"), line
    assert " of 30 are left (" in line
    assert "ulimit -n " in line


def test_without_a_script_there_are_towers() -> None:
    with expect_error(SettingError, name="engine", got="processes"):
        fit(workers=2, engine="processes", steps=1)
    pids: list[int | None] = []

    class Looks(quorate.Callback):
        def started(self, run: Any) -> None:
            pids.extend(worker.pid for worker in run.workers)

    fit(workers=2, steps=1, callbacks=[Looks()])
    assert pids == [None, None]
