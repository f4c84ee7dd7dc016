"""Worker processes: the same bits, whoever is killed, stopped or slow, and nobody is left behind.

All runs are real ones, of scripts in ``scripts/``. Two cores are enough.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import (
    LIMIT_S,
    SCRIPTS,
    TOWER,
    command,
    digests,
    facts,
    last_json,
    on_a_tower,
    processes_of,
    run,
    run_all,
    started,
)
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import SettingError, UserError
from quorate.machine import shared_memory
from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Layout
from quorate.replica.model import bind, trainable
from quorate.transports.processes.arena import Arena
from quorate.transports.processes.starter import can_fork

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")


# --- the same bits --------------------------------------------------------------------------------

# name -> options of a run in processes, and what of them its bits depend on
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "one": (("--workers", "1", "--engine", "processes"), ("--threads", "2"), ()),
    "two": (("--workers", "2"), ("--shards", "5"), ()),
    "three": (("--workers", "3"), (), ("1",)),
}


def test_one_digest_on_any_number_of_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run_all(
        {
            name: command(
                "everything.py",
                *arguments,
                options=(*options, *bits, "--run-dir", str(tmp_path / name)),
            )
            for name, (options, bits, arguments) in VARIANTS.items()
        }
    )
    for name, (_, bits, _) in VARIANTS.items():
        assert ended[name].code == 0, ended[name].said
        tower = tmp_path / f"tower-{'-'.join(bits)}"
        if not tower.exists():
            on_a_tower("everything.py", options=(*bits, "--run-dir", str(tower)))
        assert digests(tmp_path / name, capsys) == digests(tower, capsys), name
        found = facts(tmp_path / name, capsys)
        assert (found["engine"], found["global_step"]) == ("processes", 15)
    assert "on 3 cpu workers (1 thread each)" in ended["three"].out


# --- faults ---------------------------------------------------------------------------------------


def test_workers_that_are_killed_at_any_instant_change_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    kills, updates = 16, 7 * 13  # 7 epochs
    on_a_tower("faults.py", "0", str(updates))
    expected = last_json(capfd.readouterr().out)
    ended = run(command("faults.py", str(kills), str(updates), options=("--workers", "3")))
    assert ended.code == 0, ended.said
    found = last_json(ended.out)
    assert found["digest"] == expected["digest"]
    assert set(found["hit"]) == {
        "starting", "fetching", "forward", "backward", "pushing", "waiting"
    }  # fmt: skip
    assert sum(found["hit"].values()) >= 0.6 * kills  # the others came too late
    rows = 300
    assert list(found["row_sums"].values()) == [rows * (rows - 1) / 2] * 7


def test_stopped_and_slow_workers_hold_nobody_up(capfd: pytest.CaptureFixture[str]) -> None:
    on_a_tower("stragglers.py")
    expected = last_json(capfd.readouterr().out)
    ended = run(command("stragglers.py", options=("--workers", "3")))
    assert ended.code == 0, ended.said
    found = last_json(ended.out)
    assert found["digest"] == expected["digest"]
    assert "the run goes on without it" in ended.said
    times_s = found["times_s"]
    two = statistics.median(times_s["gone"][2:])  # as if there were no third worker
    # Whoever waits for one that is ten times slower takes at least 2.5 times as long. (What a slow
    # worker does cost: benchmarks/straggler.py.)
    assert statistics.median(times_s["slow"][1:]) < 2 * two, times_s


def mischief(tmp_path: Path, name: str, *options: str) -> list[str]:
    folder = tmp_path / name
    folder.mkdir()
    options = (*options, "--run-dir", str(folder / "run"))
    return command("mischief.py", name, str(folder), options=options)


def test_what_happens_once_is_made_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An exception, an exit, a segmentation fault, and a hang of all workers at once."""
    on_a_tower("mischief.py", "none", str(tmp_path), options=("--run-dir", str(tmp_path / "run")))
    ended = run_all(
        {
            "once": mischief(tmp_path, "once", "--workers", "2"),
            "hang": mischief(tmp_path, "hang", "--workers", "1", "--engine", "processes"),
        }
    )
    for name, run_ in ended.items():
        assert run_.code == 0, run_.said
        assert digests(tmp_path / name / "run", capsys) == digests(tmp_path / "run", capsys), name
        assert "no answer for 8 s in step 2" in run_.out
    happened = {p.name for p in (tmp_path / "once").iterdir() if "arrived" not in p.name}
    assert happened == {"raised", "ended", "crashed", "hung-0", "hung-1", "run"}
    assert (
        "ended with exit code 3 in step 3, shard 1, forward; another is starting"
        in ended["once"].out
    )
    assert "was killed by signal 11 (SIGSEGV) in step 4, shard 0" in ended["once"].out
    assert "Traceback" not in ended["once"].said


def test_mistakes_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("raise", "vector", "segfault", "memory")
    ended = run_all({name: mischief(tmp_path, name, "--workers", "2") for name in names})
    for name, run_ in ended.items():
        assert run_.code == (2 if name == "vector" else 1), run_.said
        assert facts(tmp_path / name / "run", capsys)["global_step"] == 3
        assert run_.err.count("Traceback") == (name != "vector"), run_.err
    at = "step 3, shard 1, rows [52, 53, 54, 55]"
    # The user's exception, with the user's frames, whatever its type.
    lines = (SCRIPTS / "mischief.py").read_text().splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if "raise MineError(" in line)
    raised = ended["raise"].err
    assert f'mischief.py", line {number}, in fail\n    raise MineError(3, 4)' in raised
    assert "MineError: 3 and 4\n" in raised
    assert "(cpu), step 3, shard 2, rows [56, 57, 58, 59]" in raised
    assert "a worker's own words" in ended["raise"].out
    # A mistake is one line.
    assert len(ended["vector"].err.splitlines()) == 1
    assert "the loss must be a scalar tensor" in ended["vector"].err
    # The death of a process.
    assert "was killed by signal 11 (SIGSEGV)" in ended["segfault"].err.splitlines()[-1]
    assert at in ended["segfault"].err.splitlines()[-1]
    memory = ended["memory"].err
    assert at in memory
    assert "4503599627370496 bytes" in memory
    assert "quorate: out of memory on cpu: " in memory
    assert "MiB free, this process has" in memory
    assert "What helps: more shards than 4 (each is smaller)" in memory


def test_scripts_that_are_not_repeatable(tmp_path: Path) -> None:
    commands = {}
    for how in ("data", "model", "fails", "edited"):
        folder = tmp_path / how
        folder.mkdir()
        (folder / "unrepeatable.py").write_text((SCRIPTS / "unrepeatable.py").read_text())
        commands[how] = command(folder / "unrepeatable.py", how, str(folder))
    ended = run_all(commands)
    for how, words in {
        "data": ["has another dataset", "its first shard, rows ["],
        "model": ["made another model: got", "[9, 6]", "expected", "[8, 6]"],
    }.items():
        assert ended[how].code == 2, ended[how].said
        (line,) = ended[how].err.splitlines()
        assert all(word in line for word in [*words, "engine='towers'"]), line
    # What happens in workers alone is shown: a coordinator got this far.
    assert ended["fails"].code == 1
    assert "RuntimeError: only in workers" in ended["fails"].err
    assert "about to fail" in ended["fails"].err
    assert ended["fails"].said.count("another is starting") <= 2 * 3
    assert "no worker is left, and no other is started" in ended["fails"].err
    # Edited under way: a worker that is lost cannot be had again, and the others go on.
    assert ended["edited"].code == 0, ended["edited"].said
    said = "unrepeatable.py has changed since, so that no other can take its place; the run goes on"
    assert said in ended["edited"].said


# --- ends -----------------------------------------------------------------------------------------


def wait_for(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    said = ""
    while word not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    return said


def workers_of(mark: str) -> list[int]:
    """Without their fork server."""
    found = [pid for pid, words in processes_of(mark).items() if "dies_with_parent.py" in words]
    return [pid for pid in found if not can_fork() or parent_of(pid) in found]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("when", ["start", "computing", "holding"])
def test_nobody_outlives_a_coordinator_that_is_killed(tmp_path: Path, when: str) -> None:
    what = {"computing": "compute", "holding": "hold"}.get(when, when)
    before = set(Path("/dev/shm").iterdir())
    with started(tmp_path, command("loops.py", what, options=("--workers", "2"))) as (run_, mark):
        wait_for(run_, when)
        deadline = time.monotonic() + 20
        # The coordinator, and a fork server that imports torch; then two workers, each with a
        # process that loads rows.
        while len(processes_of(mark)) < (2 if when == "start" else 5 + can_fork()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if when == "start":
            time.sleep(0.5)
        else:
            os.kill(workers_of(mark)[0], signal.SIGSTOP)
        run_.kill()
        killed_at = time.monotonic()
        run_.wait()
        while processes_of(mark) and time.monotonic() < killed_at + 5:
            time.sleep(0.02)
        assert time.monotonic() - killed_at < 2.0, processes_of(mark)
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if path.exists()]


def test_loops_leave_nothing(tmp_path: Path) -> None:
    words = command("loops.py", "leave", "4", options=("--workers", "2"))
    before = set(Path("/dev/shm").iterdir())
    with started(tmp_path, words) as (run_, mark):
        assert run_.stdout is not None
        said = run_.stdout.read()
        assert run_.wait(timeout=LIMIT_S) == 0, said
        assert not processes_of(mark)
        left = {path.name for path in (tmp_path / "temporary").iterdir()}
    found = last_json(said)
    assert [each["children"] for each in found] == [0] * 4
    # The first loop's parameters are in shared memory as long as the model is there.
    assert all(each["files"] <= found[0]["files"] for each in found), found
    assert len({each["files"] for each in found[1:]}) == 1, found
    assert said.count("workers are towers") == 3
    assert set(Path("/dev/shm").iterdir()) <= before
    assert all(name.startswith("torchinductor_") for name in left), left  # torch's, by its import


SLOW = """
import sys, time, torch, quorate
from torch.utils.data import TensorDataset
def loss(model, batch):
    time.sleep(0.03)
    return model(batch[0]).square().mean()
torch.manual_seed(0)
trainer = quorate.Trainer(torch.nn.Linear(3, 1), loss, optimizer=torch.optim.Adam, batch_size=8,
    shards=4)
trainer.fit(TensorDataset(torch.ones(4000, 3)), epochs=2)
print("after fit")
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_all_processes_ends_the_step_and_saves(
    tmp_path: Path, number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    options = ("--workers", "2", "--run-dir", str(tmp_path / "run"))
    with started(tmp_path, command(script, options=options)) as (run_, mark):
        wait_for(run_, "step 1/")
        workers = workers_of(mark)
        assert len(workers) == 2
        for pid in workers:  # to these alone it means nothing
            os.kill(pid, number)
        time.sleep(0.5)
        assert workers_of(mark) == workers
        # A terminal sends Ctrl-C to its whole foreground group, a cluster SIGTERM to all.
        for pid in processes_of(mark):
            os.kill(pid, number)
        assert run_.stdout is not None
        said = run_.stdout.read()
        assert run_.wait(timeout=30) == code, said
        assert not processes_of(mark)
    assert f": {number.name}\n" in said
    assert "saved step" in said
    assert "Traceback" not in said
    assert "is starting" not in said
    assert "after fit" not in said
    assert 0 < facts(tmp_path / "run", capsys)["global_step"] < 1000


# --- what a script does besides -------------------------------------------------------------------


def test_what_follows_the_first_loop_runs_once(tmp_path: Path) -> None:
    ended = run([sys.executable, str(SCRIPTS / "second_loop.py"), str(tmp_path)])
    assert ended.code == 0, ended.said
    assert (tmp_path / "notes").read_text().splitlines() == [
        *["before"] * 3,
        "after fit",
        "finally",
        "at exit",
    ]
    first, second = ended.out.split("other data\n")
    assert "towers" not in first
    assert "workers are towers: worker processes run a script up to its first" in second
    # The same in one process; evaluation after the loop uses what was trained.
    expected = second_loop()
    assert last_json(ended.out) == expected


def second_loop() -> list[dict[str, float]]:
    def rows(seed: int) -> TensorDataset:
        return TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(seed)))

    torch.manual_seed(0)
    trainer = quorate.Trainer(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
        batch_size=16,
        shards=4,
        devices="cpu",
    )
    data, other = rows(0), rows(1)
    trainer.fit(data, epochs=1)
    values = [trainer.evaluate(data), trainer.evaluate(other)]
    trainer.fit(other, epochs=2)
    return [*values, trainer.evaluate(other)]


def test_without_a_script_there_are_towers() -> None:
    trainer = quorate.Trainer(
        nn.Linear(1, 1),
        lambda m, b: m(b).mean(),
        optimizer=torch.optim.SGD,
        batch_size=2,
        workers=2,
    )
    assert trainer._engine == "towers"
    with pytest.raises(SettingError, match="got 'processes', expected a script that worker"):
        quorate.Trainer(
            nn.Linear(1, 1),
            lambda m, b: m(b).mean(),
            optimizer=torch.optim.SGD,
            batch_size=2,
            workers=quorate.Workers(engine="processes"),
        )
    code = (
        "import quorate, torch\n"
        "for engine in (None, 'processes'):\n"
        "    t = quorate.Trainer(torch.nn.Linear(1, 1), print, optimizer=print, batch_size=2,\n"
        "        devices='cpu', workers=2, engine=engine)\n"
        "    print(t._engine)\n"
    )
    ended = run([sys.executable, "-c", code])
    assert (ended.code, ended.out) == (1, "towers\n")
    assert "SettingError: engine: got 'processes', expected a script" in ended.err.splitlines()[-1]


# --- models of other libraries --------------------------------------------------------------------


def test_a_model_in_the_style_of_hugging_face(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--run-dir", str(tmp_path / "two"), "--workers", "2")
    ended = run(command("hugging_face.py", options=options))
    assert ended.code == 0, ended.said
    on_a_tower("hugging_face.py", options=("--run-dir", str(tmp_path / "tower")))
    assert digests(tmp_path / "two", capsys) == digests(tmp_path / "tower", capsys)


def test_a_keras_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed")
    options = {
        name: ("--engine", "processes", "--workers", name, "--run-dir", str(tmp_path / name))
        for name in ("1", "2")
    }
    commands = {name: command("keras_model.py", options=options[name]) for name in options}
    commands["tower"] = command("keras_model.py", options=TOWER)
    ended = run_all(commands, {"KERAS_BACKEND": "torch"})
    for name in options:
        assert ended[name].code == 0, ended[name].said
        # It learns, and so do its running statistics.
        found = last_json(ended[name].out)
        assert found["accuracy"] > 0.85, ended[name].out
        assert found["moved"] > 0.01, ended[name].out
    assert digests(tmp_path / "1", capsys) == digests(tmp_path / "2", capsys)
    # Its deep copies have other parameters, which would never be trained.
    assert ended["tower"].code == 2
    assert "use engine='processes'" in ended["tower"].err


# --- memory ---------------------------------------------------------------------------------------


def shared_model() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024))
    layout = Layout(trainable(model).items())
    flat = layout.over(Segment(layout.nbytes))
    bind(trainable(model), flat)
    return model, flat


def test_too_little_memory_is_an_error_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: 7 << 20)
    model, flat = shared_model()
    with pytest.raises(
        UserError, match=r"gradients of 4 shards on 3 workers need 14 MiB, and 7 MiB are free; use"
    ):
        Arena.create(model, flat, None, written=(), results=4, on_snapshots=False, workers=3)
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: None)
    assert (
        Arena.create(model, flat, None, written=(), results=4, on_snapshots=True, workers=3).slots
        == 10
    )


def test_another_model_is_refused_by_name_with_both_shapes() -> None:
    model, flat = shared_model()
    text, fds = Arena.create(
        model, flat, None, written=(), results=2, on_snapshots=False, workers=1
    ).handed_over()
    other = nn.Sequential(nn.Linear(512, 1023), nn.BatchNorm1d(1023))
    with pytest.raises(UserError, match=r"got .*0.weight.*\[1023, 512\].*expected .*\[1024, 512\]"):
        Arena.attach(json.loads(json.dumps(text)), fds, other)


def test_what_one_side_writes_the_other_reads() -> None:
    model, flat = shared_model()
    mine = Arena.create(model, flat, None, written=(), results=2, on_snapshots=False, workers=2)
    text, fds = mine.handed_over()
    theirs = Arena.attach(
        json.loads(json.dumps(text)), [os.dup(fd) for fd in fds], shared_model()[0]
    )
    slot, same = mine.slot(3), theirs.slot(3)
    for (name, view), other in zip(same.flat.views.items(), slot.flat.views.values(), strict=True):
        view.fill_(len(name))
        assert torch.equal(view, other)
        assert view.data_ptr() % 64 == 0 or view.data_ptr() != same.flat.vectors[0].data_ptr()
    same.floats.fill_(2.5)
    assert slot.floats.eq(2.5).all()
    assert mine.slot(2).floats.eq(0).all()  # a slot of its own
    theirs.tell(1, "backward", 7, 3)
    doing = mine.doing(1)
    assert doing[:3] == ("backward", 7, 3)
    assert 0 <= time.monotonic() - doing.since < 5
    assert mine.doing(0).phase == "starting"
