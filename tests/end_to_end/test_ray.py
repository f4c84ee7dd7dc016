"""Workers of a Ray cluster: the same bits, whoever is killed; the rules' books; nothing is left."""

import json
import os
import random
import re
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.books import each_row_was_there_once_an_epoch, lines_of
from support.clusters import RayCluster, ray_cluster
from support.heard import Heard, heard
from support.references import References
from support.runs import (
    LIMIT_S,
    TOWER,
    command,
    digests,
    inspected,
    last_json,
    processes_of,
    run,
    run_all,
    soon,
    started,
    wait_for,
)
from support.trainings.datasets import SHORT_ROWS

pytest.importorskip("ray", reason="quorate's extra ray is not installed")

KILLS = int(os.environ.get("QUORATE_TEST_KILLS", "3"))
LASTS = ("ranks.py", "steps=100000", "pause=0.01", "then=tells")


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Two nodes, of one CPU and of two, unchanged after each test."""
    with ray_cluster(tmp_path_factory.mktemp("cluster"), 1, 2) as running:
        yield running


@pytest.fixture
def cluster(shared_cluster: RayCluster) -> RayCluster:
    """The cluster, with the objects of earlier tests known: a leak fails one test, not all."""
    shared_cluster.objects_before = shared_cluster.left()["objects"]
    return shared_cluster


def nothing_is_left_on(cluster: RayCluster, objects: int = 0) -> None:
    def holds() -> bool:
        time.sleep(0.5)  # a look keeps several processes busy
        left = cluster.left()
        return left.pop("objects") <= cluster.objects_before + objects and not any(left.values())

    soon(holds, cluster.left)


def has_the_bits_of_a_tower(run_dir: Path, references: References) -> None:
    updates = inspected(run_dir)["global_step"]
    assert digests(run_dir) == references.on_a_tower("lasting.py", f"updates={updates}").digests


@pytest.mark.slow
def test_one_digest_on_any_workers_and_servers_and_across_engines(
    tmp_path: Path, references: References, cluster: RayCluster
) -> None:
    """Train on all workers, and on fewer; on several per node; with parameters cut over servers."""
    phases = "model=phases options=ema+schedule data=short"
    many = ("loss=gather", "optimizer=several", "then=halve,change")
    runs = {
        "everything": ("everything.py", (), ("--shards", "5"), 3, 3),
        # A step computed again elsewhere, with a term over some rows beside a term over all rows.
        "again": ("ranks.py", ("loss=terms", "optimizer=wolfe"), ("--shards", "5"), 2, 0),
        # A single worker's updates by shard are in order.
        "by shard": ("ranks.py", ("what=one", "then=halve"), ("--update", "async"), 1, 2),
        # A whole batch's loss, with several optimizers and changes by callbacks.
        "batch": ("ranks.py", many, ("--shards", "5"), 2, 0),
        # Models in turns; state of user code beside the model.
        "phases": ("configured.py", (phases, "0", str(tmp_path)), (), 2, 0),
        "beside": ("beside.py", (), (), 2, 0),
    }
    commands = {}
    for name, (script, words, bits, workers, servers) in runs.items():
        served = ("--servers", str(servers)) if servers else ()
        options = (*cluster.options(workers), *served, *bits, "--run-dir", str(tmp_path / name))
        commands[name] = command(script, *words, options=options)
    ended = run_all(commands, cluster.env)
    assert {name: end.code for name, end in ended.items()} == dict.fromkeys(ended, 0), ended
    for name, (script, words, bits, *_) in runs.items():
        expected = references.on_a_tower(script, *words, options=bits)
        assert digests(tmp_path / name) == expected.digests, name
        assert inspected(tmp_path / name)["doubts"] == expected.facts["doubts"], name
    assert inspected(tmp_path / "everything")["workers"] == 3
    servers_at = r"server 0 on .*\(node (\w+)\), server 1 on .*\(node (\w+)\)"
    placed = re.search(servers_at, ended["by shard"].said)
    assert placed is not None
    assert placed[1] != placed[2]  # each on a separate node
    nothing_is_left_on(cluster)


@pytest.mark.slow
def test_servers_apply_the_gradient_of_each_shard_by_itself(
    tmp_path: Path, cluster: RayCluster
) -> None:
    """Each shard reads the result of a single update on all servers, as old as reported.

    Each row counts once an epoch, though a worker is killed, and with fewer servers after a resume.
    """
    workers, bounded = cluster.options(2), ("--update", "bounded:1", "--run-dir", f"{tmp_path}/run")
    torn = (*workers, "--servers", "2", "--update", "async", "--shards", "6")
    line = "model=mlp optimizer=adam options=ema+clip+schedule data=short shards=6 rule=bounded:1"
    first = (f"{line} steps=35 event=kill-worker at=9", "0", str(tmp_path))
    rest = (f"{line} steps=60", "1", str(tmp_path))
    commands = {
        "torn": command("torn.py", "40", options=torn),
        "first": command("configured.py", *first, options=(*workers, "--servers", "2", *bounded)),
    }
    ended = run_all(commands, cluster.env)
    resumed = command("configured.py", *rest, options=(*workers, "--servers", "1", *bounded))
    ended["rest"] = run(resumed, cluster.env)
    assert {name: end.code for name, end in ended.items()} == dict.fromkeys(ended, 0), ended
    assert any(age for age, _ in last_json(ended["torn"].out)["staleness"])
    assert "another is starting" in ended["first"].said
    each_row_was_there_once_an_epoch(lines_of(tmp_path / "run"), 2, most=1, rows=SHORT_ROWS)
    nothing_is_left_on(cluster)


@pytest.mark.slow
def test_the_same_bits_whoever_is_killed(
    tmp_path: Path, references: References, cluster: RayCluster
) -> None:
    """Kill workers, the actors holding their places, and relays of nodes, at random moments."""
    stop, chance = tmp_path / "stop", random.Random(17)
    options = (*cluster.options(2), "--servers", "2", "--run-dir", str(tmp_path / "run"))
    words = command("lasting.py", "pause=0.01", f"stop={stop}", options=options)
    with heard(words, cluster.env) as said:
        at = said.wait_for("2 take part")
        for kill in range(KILLS):
            time.sleep(chance.uniform(0.0, 1.0))
            servers = cluster.processes("fork_server")
            forks = [pid for pid in servers if psutil.Process(pid).ppid() in servers]
            relays = {psutil.Process(psutil.Process(pid).ppid()).ppid() for pid in forks}
            victims = (forks, cluster.processes("WorkerLease"), relays)
            os.kill(chance.choice([*victims[kill % 3]]), signal.SIGKILL)
            at = said.wait_for("another is starting", at)
            at = said.wait_for("2 take part", at)
        stop.touch()
        assert said.ended() == 0, said.all
    has_the_bits_of_a_tower(tmp_path / "run", references)
    nothing_is_left_on(cluster)


@pytest.mark.slow
def test_nodes_come_are_killed_and_are_drained(
    tmp_path: Path, references: References, cluster: RayCluster
) -> None:
    stop, run_dir = tmp_path / "stop", tmp_path / "run"
    options = (*cluster.options(3)[:-1], "2:4", "--run-dir", str(run_dir))
    words = command("lasting.py", "pause=0.01", f"stop={stop}", options=options)
    with heard(words, cluster.env) as said:
        # 1. A node comes: within seconds the node has a worker.
        at = said.wait_for("3 take part")
        cluster.tell("add 1")
        at = said.wait_for("4 take part", at)
        # 2. The node is killed, with its worker wherever the worker is.
        cluster.tell("kill -1")
        at = said.wait_for("is lost with its", at)  # actor, or node: Ray's order varies
        at = said.wait_for("3 take part", at)
        # 3. Another node comes, and is drained: its worker hands over, and nothing is lost.
        cluster.tell("add 1")
        at = said.wait_for("4 take part", at)
        cluster.tell("drain -1")
        at = said.wait_for("because Ray drains the node; another is starting", at)
        at = said.wait_for("3 take part", at)
        stop.touch()
        assert said.ended() == 0, said.all
    assert sum("is lost with its" in line for line in said.lines) == 1, said.all
    times = [
        json.loads(line)["at"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    longest_s = max(after - before for before, after in pairwise(times[10:]))
    assert longest_s < 60.0  # no wait for anybody; seconds, if busy
    has_the_bits_of_a_tower(run_dir, references)
    cluster.tell("kill -1")
    nothing_is_left_on(cluster)


@pytest.mark.slow
def test_a_server_that_is_lost_ends_the_run_in_a_line_and_the_next_goes_on(
    tmp_path: Path, references: References, cluster: RayCluster
) -> None:
    run_dir = tmp_path / "run"
    saves = ("--save-every-steps", "2", "--run-dir", str(run_dir))
    script = ("ranks.py", "what=one", "then=tells,halve")
    options = (*cluster.options(2), *saves, "--servers", "2")
    with heard(command(*script, "pause=0.3", options=options), cluster.env) as said:
        said.wait_for("made step 3")
        server, *_ = cluster.processes(r"^ray::Server|^ray::quorate server")
        os.kill(server, signal.SIGKILL)
        assert said.ended() == 1, said.all
    assert "Traceback" not in said.all
    (line,) = (each for each in said.lines if each.startswith("quorate: server"))
    assert "is lost, and its slice of the parameters with it; run the same command" in line
    # Nothing was saved of a half-returned update.
    assert inspected(run_dir)["global_step"] in (2, 4, 6)
    rest = run(command(*script, options=(*TOWER, *saves)))
    assert rest.code == 0, rest.said
    assert digests(run_dir) == references.on_a_tower("ranks.py", "what=one", "then=halve").digests


def test_wrong_set_ups_are_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: RayCluster
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "nowhere"))
    ray = ("--engine", "ray", "--workers", "2")
    wrong: dict[tuple[str, ...], str] = {
        (*ray, "--address", "127.0.0.1:1"): "no Ray cluster is at 127.0.0.1:1",
        cluster.options(99): "99 workers of CPU=1 take 99, and it has ",
        (*ray, "--address", "ray://here"): "expected HOST:PORT",
        ray: "RAY_TMPDIR",
    }
    commands = {says: command("everything.py", options=way) for way, says in wrong.items()}
    for says, ended in run_all(commands, cluster.env).items():
        assert ended.code == 2, ended.said
        assert says in ended.err
        assert "Traceback" not in ended.said


TRAVELS = """
import os, sys
from pathlib import Path
import torch, quorate
from sizes import SHARDS

here = Path(__file__).parent
data = torch.tensor([float(word) for word in (here / "data" / "rows.txt").read_text().split()])

def loss(model, batch):
    Path(sys.argv[1], f"{os.getpid()}").write_text(f"{here}")
    if sys.argv[2:] and (batch[0] == 50.0).any():
        raise ValueError("row 50")
    return model(batch[0]).mean()

trainer = quorate.Trainer(torch.nn.Linear(1, 1), loss, batch_size=16, shards=SHARDS,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
trainer.fit(torch.utils.data.TensorDataset(data.reshape(-1, 1)), shuffle=False)
"""


def test_a_folder_travels_and_what_user_code_raises_names_worker_node_and_rows(
    tmp_path: Path, cluster: RayCluster
) -> None:
    folder = tmp_path / "app"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "rows.txt").write_text(" ".join(map(str, range(64))))
    (folder / "sizes.py").write_text("SHARDS = 4")
    (script := folder / "train.py").write_text(TRAVELS)
    (where := tmp_path / "where").mkdir()
    # At least one of two workers is on the second node, with a copy of the folder.
    travels = (*cluster.options(2)[:-1], "2:3", "--working-dir", str(tmp_path))
    ended = run_all(
        {
            "there": command(script, str(where), options=travels),
            "raises": command(script, str(where), "raise", options=cluster.options(2)),
        },
        cluster.env,
    )
    assert ended["there"].code == 0, ended["there"].said
    folders = {Path(text) for file in where.iterdir() if (text := file.read_text())}  # none torn
    assert folder in folders  # the coordinator's, compared with the workers
    assert {copy.name for copy in folders} == {"app"}
    assert len(folders) > 1
    raised = ended["raises"]
    assert raised.code == 1, raised.said
    assert "ValueError: row 50" in raised.err
    rows = r"step 3, shard 0, rows .48, 49, 50, 51."
    assert re.search(rf"quorate: worker (.) \(cpu\), {rows}", raised.err), raised.err
    assert re.search(r"quorate: worker . is on \S+ \(node [0-9a-f]{8}\)", raised.err)


@pytest.mark.slow
def test_nothing_of_a_run_that_is_killed_is_left_on_a_cluster(cluster: RayCluster) -> None:
    with heard(command(*LASTS, options=cluster.options(2)), cluster.env) as said:
        said.wait_for("made step 2 ")
        said.process.kill()
        assert said.ended() == -signal.SIGKILL, said.all
    nothing_is_left_on(cluster)


@pytest.mark.slow
def test_whoever_is_killed_a_detached_run_goes_on_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: RayCluster, references: References
) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "run"
    saves = ("--run-dir", str(folder), "--save-every-steps", "5")
    script = ("ranks.py", "steps=60", "pause=0.05", "then=tells")
    words = command(*script, options=("--detached", *cluster.options(2)[2:], *saves))
    listed = [*words[:3], "inspect", "--address", cluster.address]
    # 1. The caller is killed: the run goes on, and the next caller looks on.
    with started(tmp_path, words) as (process, _):
        wait_for(process, "made step 8 ")
        process.kill()
    assert f"{folder}  runs" in run(listed).out
    with started(tmp_path, words) as (process, _):
        # A different request under the same name is refused.
        other = run([*words[:4], "--seed", "1", *words[4:]])
        assert other.code == 2, other.said
        assert "with another script, arguments or options" in other.err
        # 2. The coordinator is killed, with its actor: Ray starts the actor again, which resumes.
        wait_for(process, "made step 12 ")
        os.kill(psutil.Process(_coordinator(cluster, folder)).ppid(), signal.SIGKILL)
        wait_for(process, "resumed ")
        wait_for(process, "made step")
        # 3. Ctrl-C here stops the run there.
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130, rest
        assert "saved step" in rest
    # 4. The saved state goes on anywhere, and nothing is left.
    ended = run(command(*script, options=(*TOWER, *saves)))
    assert ended.code == 0, ended.said
    assert digests(folder) == references.on_a_tower("ranks.py", "steps=60").digests
    nothing_is_left_on(cluster, objects=1)  # of a killed coordinator


def _coordinator(cluster: RayCluster, folder: Path) -> int:
    """Return the pid of the process with the updates, once there is such a process."""
    pattern = rf"--dies-with.*{folder}|{folder}.*--dies-with"
    soon(lambda: cluster.processes(pattern))
    return min(cluster.processes(pattern))


# --- killed processes of Ray ----------------------------------------------------------------------

SAYS = r"quorate: Ray's (raylet|head process, gcs_server,) on this machine"


def listening(pid: int) -> list[Any]:
    """Return the ports of all networks where a process listens."""
    with suppress(psutil.Error):  # the process has ended meanwhile
        there = psutil.Process(pid).net_connections("inet")
        return [each for each in there if each.status == psutil.CONN_LISTEN]
    return []


@pytest.mark.slow
@pytest.mark.parametrize("who", ["SIGKILL", "raylet"])
def test_nothing_of_a_local_cluster_is_left(tmp_path: Path, who: str) -> None:
    options = ("--engine", "ray", "--workers", "2", "--run-dir", str(tmp_path / "run"))
    words = command(*LASTS, options=options)
    with started(tmp_path, words) as (process, mark):
        said = Heard(process)
        said.wait_for("made step 2 ")
        # Wait for the process with a title over its command line, and else over its environment:
        # without the word in there, neither this test nor the ending code would find the process.
        title = "ray::DashboardAgent"
        soon(lambda: any(line.startswith(title) for line in processes_of(mark).values()))
        # Other users of this machine and of its network reach neither ports nor files.
        ports = {c.laddr.ip for pid in processes_of(mark) for c in listening(pid)}
        assert ports
        assert ports <= {"127.0.0.1", "::ffff:127.0.0.1"}
        (session,) = (tmp_path / "temporary").glob("quorate-*")
        assert stat.S_IMODE(session.stat().st_mode) == 0o700
        assert any(session.rglob("sockets"))
        if who == "SIGKILL":
            process.kill()
        else:
            lines = {p: line.replace("\0", " ") for p, line in processes_of(mark).items()}
            (pid,) = [pid for pid, line in lines.items() if "raylet/raylet " in line]
            os.kill(pid, signal.SIGKILL)
        assert said.ended(LIMIT_S) == (-9 if who == "SIGKILL" else 2), said.all
        # All at once, even Ray's processes that would take a minute to notice their uselessness.
        soon(lambda: not processes_of(mark) and not session.exists(), lambda: processes_of(mark))
    assert who == "SIGKILL" or "saved step" in said.all
    if who == "raylet":
        assert re.match(SAYS, said.lines[-1]), said.all
    assert "state-dump" not in said.all  # no page of Ray's logs
