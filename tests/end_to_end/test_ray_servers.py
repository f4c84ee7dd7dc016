"""Servers on a Ray cluster: one digest for any number of them; workers or a server are killed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clusters import RayCluster, ray_cluster
from support.references import References
from support.runs import command, digests, inspected, last_json, run, run_all

pytest.importorskip("ray", reason="quorate's extra ray is not installed")
pytestmark = pytest.mark.slow

LOCAL = ("--engine", "ray", "--workers", "2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Two nodes, of two CPUs and of one."""
    with ray_cluster(tmp_path_factory.mktemp("cluster"), 2, 1) as running:
        yield running


def test_one_digest_for_any_number_of_servers(
    tmp_path: Path, references: References, cluster: RayCluster
) -> None:
    def words(name: str, script: str, *arguments: str, options: tuple[str, ...]) -> list[str]:
        run_dir = ("--run-dir", str(tmp_path / name))
        return command(script, *arguments, options=(*run_dir, *options))

    # 1. All that a result could depend on; user code between updates; a half of a run.
    ended = run_all(
        {
            "1": words("1", "everything.py", options=(*cluster.options(2), "--servers", "1")),
            "2": words(
                "2", "served.py", "touched", "12", options=(*cluster.options(3), "--servers", "2")
            ),
            "half": words(
                "half", "served.py", "plain", "5", options=(*cluster.options(1), "--servers", "3")
            ),
        },
        cluster.env,
    )
    assert {name: end.code for name, end in ended.items()} == dict.fromkeys(ended, 0), ended
    assert digests(tmp_path / "1") == references.on_a_tower("everything.py").digests
    touched = references.on_a_tower("served.py", "touched", "12")
    assert digests(tmp_path / "2") == touched.digests
    assert [line for line in ended["2"].out.splitlines() if line.startswith("norm")] == [
        line for line in touched.out.splitlines() if line.startswith("norm")
    ]
    # Each on a node of its own.
    placed = re.search(
        r"server 0 on .*\(node (\w+)\), server 1 on .*\(node (\w+)\)", ended["2"].said
    )
    assert placed is not None
    assert placed[1] != placed[2]
    # 2. The other half without servers: the files are the same as ever.
    assert inspected(tmp_path / "half")["global_step"] == 5
    rest = run(words("half", "served.py", "plain", "12", options=("--engine", "towers")))
    assert rest.code == 0, rest.said
    assert digests(tmp_path / "half") == references.on_a_tower("served.py", "plain", "12").digests


def test_the_same_bits_when_workers_are_killed(references: References) -> None:
    expected = references.on_a_tower("ray_kills.py", "none", "120", "0").json["digest"]
    ended = run(command("ray_kills.py", "actor", "120", "2", options=(*LOCAL, "--servers", "2")))
    assert ended.code == 0, ended.said
    found = last_json(ended.out)
    assert len(found["killed"]) == 2, ended.said
    assert found["digest"] == expected


def test_a_server_that_is_lost_ends_the_run_in_a_line_and_the_next_goes_on(
    tmp_path: Path, references: References
) -> None:
    options = (*LOCAL, "--save-every-steps", "2", "--run-dir", str(tmp_path / "run"))
    lost = run(command("served.py", "killed", "12", options=(*options, "--servers", "2")))
    assert lost.code == 1, lost.said
    assert "Traceback" not in lost.said
    (line,) = (each for each in lost.err.splitlines() if each.startswith("quorate: server"))
    assert "is lost, and its slice of the parameters with it; run the same command" in line
    # Of what came back half nothing was saved.
    assert inspected(tmp_path / "run")["global_step"] in (2, 4)
    rest = run(command("served.py", "plain", "12", options=(*options, "--servers", "1")))
    assert rest.code == 0, rest.said
    expected = references.on_a_tower("served.py", "plain", "12").digests
    assert digests(tmp_path / "run") == expected
