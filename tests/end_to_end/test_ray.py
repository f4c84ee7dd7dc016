"""Workers of a Ray cluster: the same bits, whoever is killed; the rules' books; nothing is left."""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.books import (
    NO_BOUND,
    a_quorum_was_there_each_time,
    each_row_was_there_once_an_epoch,
    lines_of,
)
from support.clusters import RayCluster, ray_cluster
from support.references import References
from support.runs import (
    command,
    digests,
    inspected,
    last_json,
    processes_of,
    run,
    run_all,
    started,
    wait_for,
)

pytest.importorskip("ray", reason="quorate's extra ray is not installed")
pytestmark = pytest.mark.slow

LOCAL = ("--engine", "ray", "--workers", "2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Two nodes, of one CPU and of two."""
    with ray_cluster(tmp_path_factory.mktemp("cluster"), 1, 2) as running:
        yield running


def test_one_digest_on_one_to_three_workers_and_across_engines(
    tmp_path: Path, references: References, cluster: RayCluster
) -> None:
    def words(name: str, *options: str, arguments: tuple[str, ...] = ()) -> list[str]:
        run_dir = ("--run-dir", str(tmp_path / name))
        return command("everything.py", *arguments, options=(*run_dir, *options))

    # 1. As many workers as there are, and fewer; V = 4 and V = 5; half of a run, on a local one.
    ended = run_all(
        {
            "1": words("1", *cluster.options(1)),
            "3": words("3", *cluster.options(3)),
            "of 5": words("of 5", *cluster.options(2), "--shards", "5"),
            "resumed": words("resumed", *LOCAL, arguments=("0", "7")),
        },
        cluster.env,
    )
    assert {name: end.code for name, end in ended.items()} == dict.fromkeys(ended, 0), ended
    # 2. The other half: on towers of one process.
    assert inspected(tmp_path / "resumed")["global_step"] == 7
    rest = run(words("resumed", "--engine", "towers", "--workers", "2"))
    assert rest.code == 0, rest.said
    of_four = references.on_a_tower("everything.py").digests
    of_five = references.on_a_tower("everything.py", options=("--shards", "5")).digests
    assert digests(tmp_path / "1") == digests(tmp_path / "3") == of_four
    assert digests(tmp_path / "of 5") == of_five
    assert digests(tmp_path / "resumed") == of_four
    assert inspected(tmp_path / "3")["workers"] == 3


def test_what_is_in_no_vector_travels_too(references: References, cluster: RayCluster) -> None:
    """A step that is computed again at other parameters; what a callback changes in the model."""
    again = ("lbfgs", "towers", "1")
    ended = run_all(
        {
            "again": command("closures.py", *again, options=cluster.options(2)),
            "changes": command("user_changes.py", "12", options=cluster.options(2)),
        },
        cluster.env,
    )
    for name, script, arguments in (
        ("again", "closures.py", again),
        ("changes", "user_changes.py", ("12",)),
    ):
        assert ended[name].code == 0, ended[name].said
        expected = references.on_a_tower(script, *arguments).out.splitlines()[-1]
        assert ended[name].out.splitlines()[-1] == expected


def test_results_of_one_node_come_as_one_sum(references: References, cluster: RayCluster) -> None:
    expected = references.on_a_tower("ray_sums.py", "60").json["digest"]
    ended = run(command("ray_sums.py", "60", options=cluster.options(3)), cluster.env)
    assert ended.code == 0, ended.said
    found = last_json(ended.out)
    assert found["digest"] == expected
    assert found["sums"].get("2", 0) > 0, found  # two of the three are on one node


def test_the_same_bits_whoever_is_killed(references: References) -> None:
    expected = references.on_a_tower("ray_kills.py", "none", "240", "0").json["digest"]
    ended = run(command("ray_kills.py", "worker", "240", "2", options=LOCAL))
    assert ended.code == 0, ended.said
    found = last_json(ended.out)
    assert len(found["killed"]) == 2, ended.said
    assert found["digest"] == expected
    assert "another is starting" in ended.said


def test_rules_keep_their_books_where_one_worker_takes_5_times_as_long(
    tmp_path: Path, cluster: RayCluster
) -> None:
    updates = {"async": 120, "quorum:3": 30}  # 5 epochs of 6 steps of 4 shards
    for name in updates:
        (tmp_path / name).mkdir()
    ended = run_all(
        {
            name: command(
                "exactly_once.py",
                *("five", str(number), "0", "0", str(tmp_path / name)),
                options=(
                    *(*cluster.options(2), "--worker-resources", "CPU=0.5"),
                    *("--update", name, "--shards", "4", "--run-dir", str(tmp_path / name / "run")),
                ),
            )
            for name, number in updates.items()
        },
        cluster.env,
    )
    for name, end in ended.items():
        assert end.code == 0, end.said
        lines = lines_of(tmp_path / name / "run")
        assert len(lines) == updates[name]
        if name == "quorum:3":
            a_quorum_was_there_each_time(lines, 5, 3)
            late = lines[-1]["dropped"]
            assert late[-1] > max(late[:-1]), end.said  # the last worker is the slow one
        else:
            each_row_was_there_once_an_epoch(lines, 5, NO_BOUND)
    torn = run(
        command(
            "torn.py",
            "150",
            options=(*cluster.options(3), "--shards", "6", "--update", "bounded:2"),
        ),
        cluster.env,
    )
    assert torn.code == 0, torn.said
    found = last_json(torn.out)
    assert found["updates"] == 150
    assert max(dict(found["staleness"])) <= 2


def test_wrong_set_ups_are_one_line_each(tmp_path: Path, cluster: RayCluster) -> None:
    nobody = ("--engine", "ray", "--address", "127.0.0.1:1", "--workers", "2")
    ended = run_all(
        {
            "nobody": command("everything.py", options=nobody),
            "too many": command("everything.py", options=cluster.options(4)),
            "client": command("everything.py", options=(*nobody[:3], "ray://here", *nobody[4:])),
        },
        cluster.env,
    )
    for end in ended.values():
        assert end.code == 2, end.said
        assert "Traceback" not in end.said
    assert "no Ray cluster is at 127.0.0.1:1" in ended["nobody"].err
    assert "4 workers of CPU=1 take 4, and it has 3" in ended["too many"].err
    assert "expected HOST:PORT" in ended["client"].err


TRAVELS = """
import os, sys
from pathlib import Path
import torch, quorate
from sizes import SHARDS

here = Path(__file__).parent
data = torch.tensor([float(word) for word in (here / "data" / "rows.txt").read_text().split()])

def loss(model, batch):
    Path(sys.argv[1], f"{os.getpid()}").write_text(f"{here}")
    return model(batch[0]).mean()

trainer = quorate.Trainer(torch.nn.Linear(1, 1), loss, batch_size=16, shards=SHARDS,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
trainer.fit(torch.utils.data.TensorDataset(data.reshape(-1, 1)))
"""


def test_a_folder_travels_with_what_the_script_needs(tmp_path: Path, cluster: RayCluster) -> None:
    folder = tmp_path / "app"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "rows.txt").write_text(" ".join(map(str, range(64))))
    (folder / "sizes.py").write_text("SHARDS = 4")
    (script := folder / "train.py").write_text(TRAVELS)
    (where := tmp_path / "where").mkdir()
    travels = (*cluster.options(2), "--working-dir")
    there = ("--run-dir", str(tmp_path / "there"))
    ended = run_all(
        {
            "there": command(script, str(where), options=(*travels, str(tmp_path), *there)),
            "elsewhere": command(script, str(where), options=(*travels, str(folder / "data"))),
        },
        cluster.env,
    )
    assert ended["there"].code == 0, ended["there"].said
    folders = {Path(file.read_text()) for file in where.iterdir()}
    assert folder in folders  # of the coordinator, which compares the workers with itself
    assert {copy.name for copy in folders} == {"app"}
    assert len(folders) > 1
    on_towers = ("--engine", "towers", "--workers", "1", "--run-dir", str(tmp_path / "here"))
    assert run(command(script, str(where), options=on_towers)).code == 0
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    assert ended["elsewhere"].code == 2
    assert "expected a folder that" in ended["elsewhere"].err


RAISES = """
import torch, quorate

data = torch.arange(64.0).reshape(64, 1)

def loss(model, batch):
    if (batch[0] == 50.0).any():
        raise ValueError("row 50")
    return model(batch[0]).mean()

trainer = quorate.Trainer(torch.nn.Linear(1, 1), loss, batch_size=16, shards=4,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
trainer.fit(torch.utils.data.TensorDataset(data), shuffle=False)
"""


def test_what_user_code_raises_names_worker_node_and_rows(tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    ended = run(command(script, options=LOCAL))
    assert ended.code == 1, ended.said
    assert "ValueError: row 50" in ended.err
    assert re.search(
        r"quorate: worker (.) \(cpu\), step 3, shard 0, rows .48, 49, 50, 51.", ended.err
    )
    assert re.search(r"quorate: worker . is on \S+ \(node [0-9a-f]{8}\)", ended.err)


LONG = """
import time, torch, quorate

def loss(model, batch):
    time.sleep(0.01)
    return model(batch[0]).mean()

trainer = quorate.Trainer(torch.nn.Linear(1, 1), loss, batch_size=16, shards=4,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
trainer.fit(torch.utils.data.TensorDataset(torch.ones(64, 1)), epochs=10_000)
"""


def listening(pid: int) -> list[Any]:
    """Return the ports of all networks that a process listens at."""
    with suppress(psutil.Error):  # it has ended meanwhile
        there = psutil.Process(pid).net_connections("inet")
        return [each for each in there if each.status == psutil.CONN_LISTEN]
    return []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "long.py"
    script.write_text(LONG)
    words = command(script, options=(*LOCAL, "--run-dir", str(tmp_path / "run")))
    with started(tmp_path, words) as (process, mark):
        wait_for(process, "step 1/")
        assert len(processes_of(mark)) > 4  # those of Ray too
        # Also the one that writes a title over its command line, and else over its environment:
        # without the word in there it would not be found below, nor by who ends it.
        until = time.monotonic() + 60.0
        while not any(
            line.startswith("ray::DashboardAgent") for line in processes_of(mark).values()
        ):
            assert time.monotonic() < until, processes_of(mark)
            time.sleep(0.05)
        # Others of this machine and of its network reach neither ports nor files.
        ports = {c.laddr.ip for pid in processes_of(mark) for c in listening(pid)}
        assert ports
        assert ports <= {"127.0.0.1", "::ffff:127.0.0.1"}
        (session,) = (tmp_path / "temporary").glob("quorate-*")
        assert stat.S_IMODE(session.stat().st_mode) == 0o700
        assert any(session.rglob("sockets"))
        os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
        said = "" if number == signal.SIGKILL else process.communicate(timeout=60)[0]
        assert process.wait(60) == (130 if number == signal.SIGINT else -number), said
        assert number == signal.SIGKILL or "saved step" in said
        # All at once, also those of Ray's that would take a minute to see that nobody needs them.
        until = time.monotonic() + 60.0
        while processes_of(mark) or session.exists():
            assert time.monotonic() < until, processes_of(mark)
            time.sleep(0.05)
