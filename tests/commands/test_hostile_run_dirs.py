"""Hostile files in a run directory: each command and a resume say one line, soon, in little memory.

QUORATE_TEST_HOSTILE=300 pytest -s -k hundreds tests/commands/test_hostile_run_dirs.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.forgery.forge import forge
from support.forgery.log import forge_log
from support.small import DATA, trainer

from quorate.commands.main import main
from quorate.errors import OneLineError
from quorate.services.checkpoints import files

FORGERIES = int(os.environ.get("QUORATE_TEST_HOSTILE", "30"))
MOST_S, MOST_MB = 5.0, 300  # of a core, beside what the imports take


def resumed(run_dir: Path) -> int:
    try:
        trainer(run_dir, workers=1, summary_every_s=None, schedule=None).fit(DATA, steps=8)
    except OneLineError as error:
        print(error.line, file=sys.stderr)
        return error.exit_code
    return 0


CONSUMERS: dict[str, Callable[[Path], int]] = {
    "inspect": lambda run_dir: main(["inspect", str(run_dir)]),
    "inspect --json": lambda run_dir: main(["inspect", "--json", str(run_dir)]),
    "runs": lambda run_dir: main(["runs", str(run_dir)]),
    "runs --json": lambda run_dir: main(["runs", "--json", str(run_dir)]),
    "plan --check": lambda run_dir: main(["plan", "--steps", "20", "--check", str(run_dir)]),
    "plan FILE": lambda run_dir: main(
        ["plan", "--steps", "20", "--workers", "2", str(run_dir / "profile.json")]
    ),
    "resume": resumed,
}


def lines_of_a_log() -> list[dict[str, Any]]:
    """Return 30 updates of two workers, with what their time went into."""
    lines: list[dict[str, Any]] = []
    for step in range(1, 31):
        lines.append(
            {
                **{"global_step": step, "epoch": 0, "rows": 12, "dropped_rows": 0, "weight": 12.0},
                **{"staleness": 0, "fresh": [2 * step] * 2, "stale": [0, 0], "dropped": [0, 0]},
                **{"not_finite": 0, "lr": 0.1, "grad_norm": 1.5, "examples_per_s": 48.0},
                **{"at": 1000 + step / 4, "loss": 0.5},
            }
        )
        if step == 1:
            lines[-1]["begun_at"] = 1000.0
        if step in (1, 20, 30):
            names = ("starting", "waiting", "fetching", "forward", "backward", "pushing")
            lines[-1]["spent"] = {"shards": [2 * step] * 2} | {n: [0.1 * step] * 2 for n in names}
    lines.insert(10, {"global_step": 10, "validation": {"loss": 0.25}, "at": 1002.6})
    return lines


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of steps 4 and 6, a log and a profile."""
    run_dir = tmp_path_factory.mktemp("sound") / "run"
    options = {"save_every_steps": 2, "summary_every_s": None, "schedule": None, "workers": 2}
    trainer(run_dir, **options).fit(DATA, steps=6)
    shutil.rmtree(files.checkpoint_of(run_dir, 2))
    log = "".join(json.dumps(line) + "\n" for line in lines_of_a_log())
    (run_dir / "metrics.jsonl").write_text(log)
    phases = dict.fromkeys(
        ("starting", "waiting", "fetching", "forward", "backward", "pushing"), 4.0
    )
    workers = [{"worker": n, "device": "cpu", "shards": 200, "seconds": phases} for n in range(2)]
    profile = {
        **{"update": "sync", "engine": "processes", "shards": 4, "batch_size": 12, "cores": 2},
        **{"threads": 1, "updates": 100, "rows": 1200, "seconds": 25.0, "workers": workers},
        **{"device_s": 0.0, "exchange_s": 0.0, "update_s": 0.75, "beside_s": 0.25},
    }
    (run_dir / "profile.json").write_text(json.dumps(profile, indent=1))
    return run_dir


def memory_kib(name: str) -> int:
    """Return a line of this process's memory: VmRSS, or VmHWM, the most it had."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0])


class Looked(dict[str, Any]):
    """What became of one consumer: code, out, err, seconds, mb."""


def look(consumer: str, run_dir: Path, scratch: Path) -> Looked:
    """Have a fork of this process, which has imported all, look at a run directory."""
    out, err, told = (scratch / f"{name}.txt" for name in ("out", "err", "told"))
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            signal.alarm(60)
            for path, fd in ((out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
            before, begun = memory_kib("VmRSS"), time.process_time()
            try:
                code = CONSUMERS[consumer](run_dir)
            except BaseException:
                traceback.print_exc()
            seconds, mb = time.process_time() - begun, (memory_kib("VmHWM") - before) / 1024
            told.write_text(json.dumps({"seconds": seconds, "mb": mb}))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found = Looked(code=code, out=out.read_text(errors="replace"), err=err.read_text())
    if told.exists():
        found |= json.loads(told.read_text())
        told.unlink()
    return found


def forged(number: int, sound: Path, folder: Path) -> tuple[Path, str]:
    """Return a copy of the sound run directory with one forgery in it, and which."""
    run_dir = folder / f"{number}" / "run"
    shutil.copytree(sound, run_dir)
    if number % 3 == 0:
        done = forge(files.checkpoint_of(run_dir, 6), number)
    else:
        done = forge_log(run_dir, number)
    profile = run_dir / "profile.json"
    if number % 2 and not done.startswith("profile.json"):
        profile.unlink()  # the log says how long shards took
    return run_dir, done


def look_at(number: int, sound: Path, folder: Path) -> dict[str, Looked]:
    """Have all consumers look at a forgery."""
    run_dir, done = forged(number, sound, folder)
    found = {}
    for consumer in CONSUMERS:
        if consumer == "plan FILE" and not os.path.lexists(run_dir / "profile.json"):
            continue
        seen = found[consumer] = look(consumer, run_dir, folder)
        what = f"forgery {number}, {done!r}, {consumer}: {seen}"
        if len(what) > 3000:
            what = f"{what[:2000]} ... {what[-1000:]}"
        assert seen["code"] in (0, 2), what
        assert len(seen["err"].splitlines()) == (seen["code"] == 2), what
        assert all(c.isprintable() or c == "\n" for c in seen["out"] + seen["err"]), what
        assert seen["seconds"] < MOST_S, what
        assert seen["mb"] < MOST_MB, what
        if seen["code"] == 0 and consumer.endswith("--json"):
            refused: list[str] = []  # NaN and infinity are no JSON
            json.loads(seen["out"], parse_constant=refused.append)
            assert not refused, what
    shutil.rmtree(run_dir.parent)
    return found


@pytest.mark.parametrize("number", range(2))
def test_hostile_files_are_one_line(number: int, sound: Path, tmp_path: Path) -> None:
    look_at(number, sound, tmp_path)


@pytest.mark.slow
def test_hundreds_of_hostile_files_are_one_line(sound: Path, tmp_path: Path) -> None:
    most: dict[str, tuple[float, float]] = {}
    codes: dict[str, Counter[int]] = {name: Counter() for name in CONSUMERS}
    failed = []
    for number in range(2, 2 + FORGERIES):
        try:
            found = look_at(number, sound, tmp_path)
        except AssertionError as error:
            failed.append(str(error).partition("\nassert")[0])
            print(failed[-1])
            continue
        for name, seen in found.items():
            codes[name][seen["code"]] += 1
            s, mb = most.get(name, (0.0, 0.0))
            most[name] = max(s, seen["seconds"]), max(mb, seen["mb"])
    for name, (seconds, mb) in most.items():
        print(f"{name}: at most {seconds:.2f} s, {mb:.0f} MB; exit codes {dict(codes[name])}")
    assert not failed, "\n\n".join(failed)
