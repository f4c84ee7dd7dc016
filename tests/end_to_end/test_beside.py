"""What user code has beside the model: the same bits on all engines, after a kill, elsewhere."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.clusters import ray_cluster
from support.references import References
from support.runs import command, digests, inspected, run, run_all, started

pytestmark = pytest.mark.slow

KINDS = ("annealing", "curriculum", "teacher")
KILLED_AT = 13  # in the middle of an epoch, a step after a checkpoint
PROCESSES = ("--engine", "processes", "--workers")
COLLECTIVE = ("--engine", "collective", "--workers")
TOWERS = ("--engine", "towers", "--workers")


@pytest.mark.parametrize("what", KINDS)
def test_one_digest_on_all_engines(what: str, tmp_path: Path, references: References) -> None:
    engines = {
        "processes": (*PROCESSES, "3", "--loader-workers", "1"),
        "ranks": (*COLLECTIVE, "2"),
        "towers": (*TOWERS, "2"),
    }
    ended = run_all(
        {
            name: command("beside.py", what, options=(*options, "--run-dir", str(tmp_path / name)))
            for name, options in engines.items()
        }
    )
    assert {name: end.code for name, end in ended.items()} == dict.fromkeys(ended, 0), ended
    expected = references.on_a_tower("beside.py", what).digests
    assert {name: digests(tmp_path / name) for name in ended} == dict.fromkeys(ended, expected)


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((*PROCESSES, "2"), (*PROCESSES, "3")),
        ((*COLLECTIVE, "2"), (*TOWERS, "1")),
        ((*TOWERS, "3"), (*COLLECTIVE, "2")),
    ],
    ids=["processes", "ranks-to-a-tower", "towers-to-ranks"],
)
def test_a_run_that_is_killed_goes_on_elsewhere(
    what: str,
    before: tuple[str, ...],
    after: tuple[str, ...],
    tmp_path: Path,
    references: References,
) -> None:
    run_dir = ("--run-dir", str(tmp_path / "run"))
    words = command("beside.py", what, str(KILLED_AT), options=(*before, *run_dir))
    with started(tmp_path, words) as (killed, _):
        said, _ = killed.communicate(timeout=120)
        assert killed.returncode == -signal.SIGKILL, said
    assert inspected(tmp_path / "run")["global_step"] == 12, said
    ended = run(command("beside.py", what, options=(*after, *run_dir)))
    assert ended.code == 0, ended.said
    assert "resumed step 12 (epoch 3, 40%)" in ended.said
    assert digests(tmp_path / "run") == references.on_a_tower("beside.py", what).digests


def test_a_worker_that_is_killed_comes_back_to_what_is_set_by_then(
    tmp_path: Path, references: References
) -> None:
    run_dir = ("--run-dir", str(tmp_path / "run"))
    ended = run(command("beside.py", "teacher", "-5", options=(*PROCESSES, "2", *run_dir)))
    assert ended.code == 0, ended.said
    assert "worker 0 was there in the end" in ended.out
    assert digests(tmp_path / "run") == references.on_a_tower("beside.py", "teacher").digests


def test_workers_of_other_nodes_have_it(tmp_path: Path, references: References) -> None:
    pytest.importorskip("ray", reason="quorate's extra ray is not installed")
    run_dir = ("--run-dir", str(tmp_path / "run"))
    with ray_cluster(tmp_path, 1, 2) as cluster:
        words = command("beside.py", "teacher", options=(*cluster.options(3), *run_dir))
        ended = run(words, cluster.env)
    assert ended.code == 0, ended.said
    assert digests(tmp_path / "run") == references.on_a_tower("beside.py", "teacher").digests
