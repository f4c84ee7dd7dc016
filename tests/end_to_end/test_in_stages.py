"""Workers in stages, as processes of a run: one digest, also after kills; what a run goes on as."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.references import References
from support.runs import command, digests, inspected, run, run_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="stages are for Linux"),
]

STAGES = ("--devices", "cpu+cpu", "--split", "embedding")


def test_one_digest_in_one_piece_and_in_stages(tmp_path: Path, references: References) -> None:
    variants = {
        "two workers": (*STAGES, "--workers", "2"),
        "three stages": (
            *("--devices", "cpu+cpu+cpu", "--split", "embedding,dropout"),
            *("--pipeline", "zero-bubble"),
        ),
    }
    ended = run_all(
        {
            name: command("everything.py", options=(*options, "--run-dir", str(tmp_path / name)))
            for name, options in variants.items()
        }
    )
    # Begun in one piece, it goes on in stages.
    first = command("everything.py", "0", "7", options=("--run-dir", str(tmp_path / "resumed")))
    then = command("everything.py", options=(*STAGES, "--run-dir", str(tmp_path / "resumed")))
    ended |= {"first": run(first), "then": run(then)}
    expected = references.on_a_tower("everything.py").digests
    for name, each in ended.items():
        assert each.code == 0, (name, each.said)
    for name in (*variants, "resumed"):
        assert digests(tmp_path / name) == expected, name
    assert inspected(tmp_path / "two workers")["devices"] == ["cpu+cpu"]


def test_stages_that_are_killed_or_hang(tmp_path: Path) -> None:
    def words(name: str, phase: str, *options: str) -> list[str]:
        marks = tmp_path / f"marks of {name}"
        marks.mkdir()
        run_dir = ("--run-dir", str(tmp_path / name))
        return command("in_stages.py", phase, str(marks), options=(*options, *run_dir))

    phases = ("forward", "backward")  # others in tests/transports/test_stages.py
    hangs = ("hang", "stop")  # the worker is replaced, with all of its stages
    late = ("--engine", "processes", "--worker-timeout-s", "8")
    ended = run_all(
        {"whole": words("whole", "none")}
        | {p: words(p, p, *STAGES) for p in phases}
        | {p: words(p, p, *STAGES, *late) for p in hangs}
    )
    for name, each in ended.items():
        assert each.code == 0, (name, each.said)
        assert digests(tmp_path / name) == digests(tmp_path / "whole"), name
    for phase in hangs:
        said = ended[phase].said
        assert re.search(r"no answer for \d+ s in step 0, .* in stage 1 for .*; another is", said)
    for phase in phases:
        assert len([*(tmp_path / f"marks of {phase}").iterdir()]) == 2
        assert (
            "the process of stage 1 of a replica was killed by signal 9 (SIGKILL)"
            in ended[phase].said
        )
