"""The fork server on standby: its forks are as any other's; it is gone where it is not needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.about_itself import ABOUT_ITSELF, kind
from support.runs import LIMIT_S, last_json

from quorate.machine.surroundings import can_fork
from quorate.transports import standby
from quorate.transports.processes.script import Script
from quorate.transports.processes.starter import ForkServer, Spawner, new_starter
from quorate.transports.processes.wire import Wire
from quorate.transports.standby import Server

pytestmark = pytest.mark.skipif(
    not can_fork(), reason="a new interpreter is spawned for each worker"
)

TRAINS = """
import json, os, sys
import quorate, torch
from quorate.transports.processes.worker import here
from torch.utils.data import TensorDataset

os.environ.setdefault("BY_THE_SCRIPT", str(os.getpid()))  # workers have the coordinator's
mine = os.environ["BY_THE_SCRIPT"]
if here() is not None:
    exec(ABOUT)
    about["by the script"] = mine
    Path(sys.argv[1], str(here().number)).write_text(json.dumps(about))
trainer = quorate.Trainer(
    torch.nn.Linear(3, 1), lambda model, batch: model(batch[0]).square().mean(),
    optimizer=torch.optim.SGD, batch_size=8, shards=2,
)
children = len(open(f"/proc/self/task/{os.getpid()}/children").read().split())
trainer.fit(TensorDataset(torch.randn(16, 3)), epochs=1)
weights = repr(trainer.model.weight)
print(json.dumps({"by the script": mine, "children": children, "weights": weights}))
""".replace("exec(ABOUT)", f"exec({ABOUT_ITSELF!r})")

# Calls the command in a process that has imported torch, whose forks are no servers.
LATE = "import sys, torch\nfrom quorate.commands.main import main\nsys.exit(main())"


def trained(folder: Path, *options: str, late: bool = False) -> tuple[Any, list[dict[str, Any]]]:
    """What the coordinator of a run of the script says, and what its workers do of themselves."""
    folder.mkdir()
    (folder / "script.py").write_text(TRAINS)
    starts = ["-c", LATE] if late else ["-m", "quorate"]
    words = [sys.executable, *starts, "run", "--devices", "cpu", *options]
    done = subprocess.run(
        [*words, str(folder / "script.py"), str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    abouts = [json.loads((folder / n).read_text()) for n in "01" if (folder / n).exists()]
    return last_json(done.stdout), abouts


@pytest.mark.slow
def test_a_fork_of_the_one_on_standby_is_as_any_other(tmp_path: Path) -> None:
    of_standby, forks = trained(tmp_path / "standby", "--workers", "2")
    of_other, others = trained(tmp_path / "other", "--workers", "2", late=True)
    assert of_standby["weights"] == of_other["weights"]
    assert [run["children"] for run in (of_standby, of_other)] == [1, 0]
    for run, workers in ((of_standby, forks), (of_other, others)):
        assert [each["by the script"] for each in workers] == [run["by the script"]] * 2
    for fork, other in zip(forks, others, strict=True):
        held = [sorted(kind(name) for name in each["fds"].values()) for each in (fork, other)]
        assert held[0] == held[1]
        assert (fork["tasks"], fork["group"], fork["fds"]["0"]) == (1, True, os.devnull)
        assert "dies_with_parent.py" not in " ".join(fork["command"])
        for name in ("fds", "command", "random", "path", "argv", "by the script"):
            del fork[name], other[name]
        assert fork == other


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--workers", "1"), ("--engine", "towers", "--workers", "2")])
def test_a_run_without_worker_processes_has_none(tmp_path: Path, options: tuple[str, ...]) -> None:
    found, workers = trained(tmp_path / "run", *options)
    assert (found["children"], workers) == (0, [])


class Fake:
    """The process of a server."""

    pid = 0

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def wait(self) -> int:
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        if self.code is None:
            self.code = -9


@pytest.fixture
def script() -> Script:
    return Script("script.py", None, (), "/", None)


def ready(monkeypatch: pytest.MonkeyPatch, code: int | None = None) -> tuple[Fake, Wire]:
    """Put a server on standby; return its process and its end of the wire."""
    process, (ours, theirs) = Fake(code), Wire.pair()
    monkeypatch.setattr(standby, "_ready", Server(process, ours))
    return process, theirs


def test_it_is_taken_once_and_ended_by_who_took_it(
    monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    process, wire = ready(monkeypatch)
    starter = new_starter(script, 1, threads=1)
    standby.send_away()
    assert process.code is None
    assert standby.taken() is None
    starter.close()
    assert process.code == -9
    assert wire.receive() is None
    wire.close()


def test_one_that_ended_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    _, wire = ready(monkeypatch, code=-9)
    assert standby.taken() is None
    assert wire.receive() is None
    wire.close()


def test_threads_that_must_not_spin_have_a_server_that_knows(
    monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    process, wire = ready(monkeypatch)
    new_starter(script, 1000, threads=2).close()
    assert process.code is None
    new_starter(script, 1000, threads=1).close()  # a thread alone waits for none
    assert process.code == -9
    wire.close()


def test_the_child_of_this_process_is_waited_for_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child = standby._Child(process.pid)
    assert child.poll() is None
    child.kill()
    assert (child.wait(), child.wait(), child.poll()) == (-9, -9, -9)
    child.kill()  # its number may be another's by now
    assert standby._Child(process.pid).wait() == -9  # somebody else has waited for it
    process.returncode = -9  # as Popen was not asked


def test_where_there_is_no_fork_there_is_no_server(
    monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    def fork() -> int:
        raise OSError("no memory")

    monkeypatch.setattr(os, "fork", fork)
    with standby.on_standby():
        assert standby.taken() is None
        starter = new_starter(script, 1, threads=1)
        assert isinstance(starter, (ForkServer, Spawner))
        starter.close()
