"""What a script does before its training loop, on workers: who is one, a log, input, mistakes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.runs import command, run

pytestmark = pytest.mark.slow

BEGIN = """
import sys, torch, quorate
from torch.utils.data import TensorDataset
"""
END = """
torch.manual_seed(0)
def loss(model, batch):
    return (model(batch[0]) - 1).square().mean()
trainer = quorate.Trainer(torch.nn.Linear(4, 1), loss, batch_size=8, shards=2,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
trainer.fit(TensorDataset(torch.ones(32, 4)), epochs=1)
"""
ENGINES = {
    "processes": ("--workers", "2"),
    "ranks": ("--workers", "2", "--engine", "collective"),
    "towers": ("--workers", "2", "--engine", "towers"),
}


def words(tmp_path: Path, before: str, engine: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(BEGIN + before + END)
    return command(script, options=ENGINES[engine])


@pytest.mark.parametrize(
    ("engine", "most"), [("processes", [False, True, True]), ("ranks", [False, True])]
)
def test_who_is_a_worker(engine: str, most: list[bool], tmp_path: Path) -> None:
    note = f"open({str(tmp_path / 'roles')!r}, 'a').write(f'{{quorate.is_worker()}}\\n')\n"
    ended = run(words(tmp_path, note, engine))
    assert ended.code == 0, ended.said
    assert sorted((tmp_path / "roles").read_text().split()) == [str(role) for role in most]


def test_who_is_no_worker_on_towers(tmp_path: Path) -> None:
    note = f"open({str(tmp_path / 'roles')!r}, 'a').write(f'{{quorate.is_worker()}}\\n')\n"
    assert run(words(tmp_path, note, "towers")).code == 0
    assert (tmp_path / "roles").read_text() == "False\n"


@pytest.mark.parametrize("engine", ["processes", "ranks"])
def test_a_log_that_workers_empty_is_named_once(engine: str, tmp_path: Path) -> None:
    log = f"log = open({str(tmp_path / 'train.log')!r}, 'w')\n"
    ended = run(words(tmp_path, log, engine))
    assert ended.code == 0, ended.said
    (line,) = [line for line in ended.out.splitlines() if "train.log" in line]
    assert "each worker process empties the file (script.py:4)" in line
    guarded = f"if not quorate.is_worker():\n    {log}"
    ended = run(words(tmp_path, guarded, engine))
    assert ended.code == 0, ended.said
    assert "train.log" not in ended.out


@pytest.mark.parametrize("engine", ["processes", "ranks"])
def test_a_script_that_reads_its_input(engine: str, tmp_path: Path) -> None:
    line = words(tmp_path, "name = input()\n", engine)
    ended = subprocess.run(line, input="bob\n", capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr == (
        "quorate: stdin: script.py:4 reads it in a worker process, which has none; read it only "
        "where quorate.is_worker() is False, or take what the script needs from its arguments\n"
    )
    guarded = words(tmp_path, "name = '' if quorate.is_worker() else input()\n", engine)
    ended = subprocess.run(guarded, input="bob\n", capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_no_input_at_all_is_what_it_is(tmp_path: Path) -> None:
    line = words(tmp_path, "assert sys.stdin.read() == ''\n", "processes")
    ended = subprocess.run(
        line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr


RAISES = "if quorate.is_worker():\n    raise FileNotFoundError(2, 'No such file', 'rows.csv')\n"


def test_what_the_script_raises_in_workers_is_shown_once(tmp_path: Path) -> None:
    ended = run(words(tmp_path, RAISES, "processes"))
    assert ended.code == 1
    assert ended.said.count("Traceback") == 1
    text = "FileNotFoundError: [Errno 2] No such file: 'rows.csv'"
    (line,) = [line for line in ended.out.splitlines() if text in line]
    assert line.endswith(f" raised {text} (script.py:5) while starting; another is starting")
    assert text in ended.err
    assert 'script.py", line 5, in <module>' in ended.err
    assert len(ended.err.splitlines()) < 12, ended.err


def test_what_the_script_raises_in_ranks_is_a_line(tmp_path: Path) -> None:
    ended = run(words(tmp_path, RAISES, "ranks"))
    assert ended.code == 1
    assert ended.err == (
        "quorate: rank 1 raised FileNotFoundError: [Errno 2] No such file: 'rows.csv' "
        "(script.py:5) while starting, before all ranks had met\n"
    )


def test_a_checkpoint_has_the_modes_of_the_umask(tmp_path: Path) -> None:
    line = [*words(tmp_path, "import os; os.umask(0o027)\n", "processes")]
    at = line.index("--workers")
    ended = run([*line[:at], "--run-dir", str(tmp_path / "run"), *line[at:]])
    assert ended.code == 0, ended.said
    found = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "run").rglob("*")}
    assert any(path.name == "model.safetensors" for path in found)
    lock = found.pop(tmp_path / "run" / "run.lock")
    assert lock == 0o600  # who may only read the directory must not be able to lock it
    for path, mode in found.items():
        assert mode == (0o750 if path.is_dir() else 0o640), path
