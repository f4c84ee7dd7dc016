"""Losses over the whole batch on a Ray cluster: the bits of a tower, whoever is killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.clusters import ray_cluster
from support.references import References
from support.runs import command, run_all

pytest.importorskip("ray", reason="quorate's extra ray is not installed")
pytestmark = pytest.mark.slow

STEPS = "9"  # three epochs
LOCAL = ("--engine", "ray", "--workers", "2")


def digest_in(text: str) -> str:
    (line,) = re.findall(r"^digest (\w+)$", text, re.MULTILINE)
    return str(line)


def test_one_digest_on_workers_of_one_node_and_of_several(
    references: References, tmp_path: Path
) -> None:
    """On the coordinator's node and on another; killed in the one pass or in the other."""
    expected = {
        shards: digest_in(
            references.on_a_tower(
                "gathered.py", "towers", "1", options=("--shards", str(shards))
            ).out
        )
        for shards in (4, 5)
    }

    def words(name: str, *more: str, options: tuple[str, ...]) -> list[str]:
        arguments = ("ray", "2", str(tmp_path / name), STEPS, *more)
        return command("gathered.py", *arguments, options=options)

    folders = [tmp_path / f"killed in pass {number}" for number in (1, 2)]
    for folder in folders:
        folder.mkdir()
    with ray_cluster(tmp_path, 1, 2) as cluster:
        ended = run_all(
            {
                "4 on 3": words("4 on 3", options=(*cluster.options(3), "--shards", "4")),
                "pass 2": words("pass 2", str(folders[1]), "2", options=LOCAL),
                "pass 1": words("pass 1", str(folders[0]), "1", options=cluster.options(3)),
            },
            cluster.env,
        )
    for name, end in ended.items():
        assert end.code == 0, (name, end.said)
        assert digest_in(end.out) == expected[4 if name[0] == "4" else 5], name
    for folder in folders:
        assert len([*folder.iterdir()]) >= 2, ended
