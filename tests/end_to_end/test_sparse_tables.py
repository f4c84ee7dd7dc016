"""Gradients by rows on worker processes: one digest, after a resume and a kill too; refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.references import References
from support.runs import command, digests, run, run_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc"),
]

SCRIPT, STEPS = "sparse_tables.py", "12"  # two epochs; 4 is in the middle of the first


def words(
    run_dir: Path, workers: int, engine: str, steps: str, optimizer: str, *more: str
) -> list[str]:
    options = ("--workers", str(workers), "--engine", engine, "--run-dir", str(run_dir))
    return command(SCRIPT, steps, optimizer, *more, options=options)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sparse_adam"])
def test_one_digest_on_processes_and_after_a_resume(
    optimizer: str, tmp_path: Path, references: References
) -> None:
    expected = references.on_a_tower(SCRIPT, STEPS, optimizer).digests
    assert expected[1] is not None  # of the averaged weights
    begun = {
        "two": words(tmp_path / "two", 2, "processes", STEPS, optimizer),
        "resumed": words(tmp_path / "resumed", 2, "towers", "4", optimizer),
    }
    if optimizer == "adagrad":
        begun["four"] = words(tmp_path / "four", 4, "processes", STEPS, optimizer)
    ended = run_all(begun)
    ended["resumed again"] = run(words(tmp_path / "resumed", 2, "processes", STEPS, optimizer))
    for name, each in ended.items():
        assert each.code == 0, each.said
        assert "same bits: no" not in each.said, name
    for name in begun:
        assert digests(tmp_path / name) == expected, name


def test_one_digest_where_a_worker_is_killed(tmp_path: Path, references: References) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    ended = run(words(tmp_path / "killed", 2, "processes", STEPS, "sgd", str(folder)))
    assert ended.code == 0, ended.said
    assert (folder / "killed").exists()
    assert "was killed by signal 9" in ended.said
    expected = references.on_a_tower(SCRIPT, STEPS, "sgd").digests
    assert digests(tmp_path / "killed") == expected


def test_ranks_refuse_it_in_a_line(tmp_path: Path) -> None:
    ended = run(words(tmp_path / "ranks", 2, "collective", STEPS, "sgd"))
    assert ended.code == 2, ended.said
    assert "engine: got 'collective', expected one that hands over the gradient of" in ended.err
    assert "leave sparse=True out" in ended.err
