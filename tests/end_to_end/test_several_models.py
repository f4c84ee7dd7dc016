"""Several models in one training: one digest on any engine, killed or not, resumed anywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.references import References
from support.runs import (
    SCRIPTS,
    command,
    digests,
    inspected,
    killed_after_a_save,
    run,
    run_all,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc"),
]

SCRIPT = ("several_models.py", "43")  # in the third epoch of 16 updates, between a d and a g

VARIANTS: dict[str, tuple[str, ...]] = {
    "two towers": ("--engine", "towers", "--workers", "2"),
    "three towers": ("--engine", "towers", "--workers", "3"),
    "a process": ("--engine", "processes", "--workers", "1"),
    "two processes": ("--engine", "processes", "--workers", "2"),
    "two ranks": ("--engine", "collective", "--workers", "2"),
    "three ranks": ("--engine", "collective", "--workers", "3"),
}


def test_one_digest_on_any_engine(tmp_path: Path, references: References) -> None:
    expected = references.on_a_tower(*SCRIPT).digests
    assert expected[1] is not None  # of the averaged weights
    words = {
        name: command(*SCRIPT, options=(*options, "--run-dir", str(tmp_path / name)))
        for name, options in VARIANTS.items()
    }
    for name, ended in run_all(words).items():
        assert ended.code == 0, ended.said
        assert digests(tmp_path / name) == expected, name
        assert inspected(tmp_path / name)["same_bits"], name


def test_workers_that_are_killed_change_nothing(tmp_path: Path, references: References) -> None:
    options = ("--engine", "processes", "--workers", "2", "--run-dir", str(tmp_path / "run"))
    ended = run(command(*SCRIPT, "5", options=options))
    assert ended.code == 0, ended.said
    assert ended.said.count("was killed by signal 9") == 5, ended.said
    assert digests(tmp_path / "run") == references.on_a_tower(*SCRIPT).digests


@pytest.mark.parametrize("engines", [("processes", "processes"), ("collective", "towers")])
def test_a_run_that_is_killed_goes_on_elsewhere(
    engines: tuple[str, str], tmp_path: Path, references: References
) -> None:
    """On three workers, and all of them are killed in the middle of a round; then on two."""
    run_dir = tmp_path / "run"
    script = ("several_models.py", "70")
    options = ("--run-dir", str(run_dir), "--save-every-steps", "7")
    words = command(*script, options=(*options, "--engine", engines[0], "--workers", "3"))
    step = killed_after_a_save(tmp_path, words, run_dir)
    assert 7 <= step < 70
    ended = run(command(*script, options=(*options, "--engine", engines[1], "--workers", "2")))
    assert ended.code == 0, ended.said
    assert f"resumed step {step} " in ended.out
    assert digests(run_dir) == references.on_a_tower(*script).digests


def test_workers_of_a_ray_cluster(tmp_path: Path, references: References) -> None:
    pytest.importorskip("ray", reason="quorate's extra ray is not installed")
    options = ("--engine", "ray", "--workers", "2", "--run-dir", str(tmp_path / "run"))
    ended = run(command(*SCRIPT, options=options))
    assert ended.code == 0, ended.said
    assert digests(tmp_path / "run") == references.on_a_tower(*SCRIPT).digests


def test_another_precision(tmp_path: Path, references: References) -> None:
    script = ("several_models.py", "8")
    variants = {"one": ("--engine", "towers", "--workers", "1"), "two": ("--workers", "2")}
    found = set()
    for name, options in variants.items():
        where = ("--run-dir", str(tmp_path / name))
        ended = run(command(*script, options=("--precision", "bf16", *options, *where)))
        assert ended.code == 0, ended.said
        found.add(digests(tmp_path / name))
    assert len(found) == 1
    assert references.on_a_tower(*script).digests not in found


def test_verify_finds_nothing() -> None:
    options = ("--workers", "1,2", "--updates", "6", "--no-resume", "--no-kill", "--devices", "cpu")
    script = str(SCRIPTS / "several_models.py")
    ended = run([sys.executable, "-m", "quorate", "verify", *options, script, "20"])
    assert ended.code == 0, ended.said
    assert "same bits" in ended.out
