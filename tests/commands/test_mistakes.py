"""A user's mistake: one line that names what was got and expected, exit code 2, nothing started."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import command, run
from support.typed_mistakes import MISTAKES, make

from quorate.commands.main import main

BROKEN = str(Path(__file__).parents[1] / "scripts" / "broken.py")

IN_THE_SCRIPT = {
    "vector-loss": ["scalar tensor", "shape (4, 1)"],
    "no-gradient": ["no gradient", "shape ()"],
    "none": ["scalar tensor", "NoneType None"],
    "float-loss": ["scalar tensor", "float 0.5"],
    "no-loss": ['the key "loss"', "'accuracy'"],
    "negative-weight": ["weight: got int -1", ">= 0"],
    "zero-weight": ["weight: got 0 in all 2 shards"],
    "vector-metric": ["metric 'accuracy'", "shape (4, 1)"],
    "other-model": ["no gradient with respect to the model"],
    "empty": ["0 rows", "at least one row"],
    "iterable": ["got Endless", "map-style"],
    "no-dataset": ["got int", "map-style"],
    "batch-size-0": ["batch_size: got 0", ">= 1"],
    "batch-size-float": ["batch_size: got 8.0", "whole number"],
    "batch-size-true": ["batch_size: got True", "whole number"],
    "clip-0": ["clip_norm: got 0", "> 0"],
    "ema-1": ["ema_decay: got 1.0", "< 1"],
    "plateau": ["schedule_metric: got None"],
    "optimizer": ["optimizer: got 'NoneType'"],
    "rule": ["update: got 'majority'", "sync, quorum:R, async, bounded:K"],
    "optimizer-itself": ["optimizer: got 'SGD'", "a function from parameters"],
    "no-function": ["loss: got 'NoneType'"],
    "schedule-itself": ["schedule: got 'int'"],
    "other-schedule": ["schedule: got 'a scheduler of another optimizer'"],
    "text-metric": ["metric 'accuracy': got str 'high'", "a scalar"],
    "run-dir-file": ["run_dir: got", "broken.py is not a directory"],
    "run-dir-number": ["run_dir: got 5"],
    "epochs-0": ["epochs: got 0", ">= 1"],
}
AT_THE_COMMAND = {
    ("--devices", "gpu"): ["devices: got 'gpu'", "cpu, cuda"],
    ("--devices", "cuda:77"): ["devices: got 'cuda:77'"],
    ("--devices", ""): ["devices: got ''"],
    ("--devices", "cpu+cuda:77"): ["devices: got 'cuda:77'"],
    ("--devices", "cpu+cpu"): ["split: 2 stages of a model that calls a single module"],
    ("--workers", "0"): ["workers: got 0", ">= 1"],
    ("--workers", f"{10**20}"): [f"workers: got {10**20}", "<= 4096"],
    ("--threads", "100000000"): ["threads: got 100000000", "<= 1024"],
    ("--seed", f"{2**64}"): [f"seed: got {2**64}", f"<= {2**64 - 1}"],
    ("--workers", "two"): ["workers: got 'two'", "a whole number"],
    ("--shards", "0"): ["shards: got 0", ">= 1"],
    ("--shards", "9"): ["shards: got 9", "8 rows of a batch"],
    ("--threads", "0"): ["threads: got 0"],
    ("--engine", "magic"): ["engine: got 'magic'"],
    ("--seed", "-1"): ["seed: got -1"],
    ("--memory-fraction", "1.5"): ["memory_fraction: got 1.5", "at most 1"],
    ("--memory-fraction", "0"): ["memory_fraction: got 0", "> 0"],
    ("--update", "quorum"): ["update: got 'quorum'", "quorum:R"],
    ("--update", "quorum:0"): ["update: got 'quorum:0'", "R must be at least 1"],
    ("--update", "quorum:9"): ["update: got 'quorum:9'", "at most the 2 shards"],
    ("--update", "bounded:few"): ["update: got 'bounded:few'", "whole number"],
    ("--update", "bounded:-1"): ["update: got 'bounded:-1'", "K must be at least 0"],
    ("--update", "async:2"): ["update: got 'async:2'"],
}


# Setting -> values as Python has them, each with what its line says.
OF_THE_TRAINER = {
    "batch_size": {"None": "got None", "float('nan')": "got nan", "[8]": "got [8]"},
    "shards": {"2.0": "got 2.0, expected a whole number >= 1", "'2'": "got '2'"},
    "seed": {"1.5": "got 1.5, expected a whole number >= 0"},
    "workers": {"1.5": "got 1.5", "[2]": "got [2]"},
    "update": {"5": "got 5", "'sync:1'": "got 'sync:1'", "'bounded:1.5'": "got 'bounded:1.5'"},
    "precision": {"'fp64'": "got 'fp64'", "None": "got None"},
    "totals": {"5": "got 'int'", "{'a': 5}": "totals['a']"},
    "clip_norm": {"float('inf')": "got inf", "'1'": "got '1', expected a number > 0"},
    "ema_decay": {"2": "got 2, expected a number > 0 and < 1", "float('nan')": "got nan"},
    "nonfinite": {"'ignore'": "got 'ignore', expected stop or skip"},
    "engine": {"5": "got 5"},
    "threads": {"None": "got None", "2.0": "got 2.0"},
    "worker_timeout_s": {"float('nan')": "got nan", "-1": "got -1, expected a number > 0"},
    "collate": {"'x'": "got 'str', expected a function", "lambda: 1": "have it take 1 positional"},
    "augment": {"lambda batch: batch": "have it take 2 positional arguments"},
    "order": {"'random'": "got 'str', expected a function"},
    "loader_workers": {"-1": "got -1", "1.5": "got 1.5"},
    "save_every_s": {"0": "got 0", "'often'": "got 'often'"},
    "save_every_steps": {"1.5": "got 1.5"},
    "keep": {"0": "got 0", "None": "got None"},
    "init_from": {"5": "got 5", "''": "got ''"},
    "run_dir": {"''": "got ''", "b'x'": "got b'x'", "chr(0)": "expected the path of a directory"},
    "optimizer": {"lambda: 1": "have it take 1 positional", "'adam'": "got 'str'"},
    "schedule": {"lambda optimizer: None": "got 'NoneType'", "lambda: 1": "have it take 1"},
    "compile": {"'no'": "got 'no', expected True or False", "5": "got 5"},
    "kernels": {"'mkl'": "got 'mkl', expected torch or onednn or measured", "5": "got 5"},
    "soft_placement": {"'no'": "got 'no', expected True or False"},
    "no_such": {"1": "expected a keyword of Trainer"},
}
WITH_PATHS = (
    "run {PATH}",
    "run -m {PATH}",
    "run --devices cpu --init-from {PATH} {BROKEN} fine",
    "run --devices cpu --run-dir {PATH} {BROKEN} fine",
    "run --devices cpu --trace {PATH} {BROKEN} fine",
    "run --devices cpu --profile {PATH} {BROKEN} fine",
    "run --devices cpu --record {PATH} {BROKEN} fine",
    "run --devices cpu --measure-model {PATH} {BROKEN} fine",
    "verify {PATH}",
    "bench {PATH}",
    "bench --out {PATH} {BROKEN}",
    "runs {PATH}",
    "inspect {PATH}",
    "plan {PATH}",
    "plan --check {PATH}",
    "convert {PATH} labels target",
)
OF_FIT = {
    "epochs": {"1.5": "got 1.5", "None": "got None", "-1": "got -1"},
    "steps": {"0": "got 0, expected a whole number >= 1", "'a'": "got 'a'"},
    "max_time_s": {"0": "got 0", "float('nan')": "got nan"},
    "callbacks": {"5": "got 'int'", "[5]": "got 5", "[dict]": "quorate.Callback"},
    "validation": {"5": "got int", "[]": "got 0 rows"},
    "shuffle": {"'no'": "got 'no', expected True or False"},
    "epoch": {"1": "did you mean epochs?"},
}
SETTINGS = [
    (place, name, value, said)
    for place, table in (("trainer", OF_THE_TRAINER), ("fit", OF_FIT))
    for name, values in table.items()
    for value, said in values.items()
]


def the_line(captured: pytest.CaptureFixture[str]) -> str:
    shown = captured.readouterr()
    lines = shown.err.splitlines()
    assert len(lines) == 1, shown
    return lines[0]


@pytest.mark.parametrize("mistake", IN_THE_SCRIPT)
def test_a_mistake_in_the_script(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--devices", "cpu", "--workers", "2", BROKEN, mistake]) == 2
    line = the_line(capsys)
    assert all(part in line for part in IN_THE_SCRIPT[mistake]), line


@pytest.mark.parametrize(("place", "name", "value", "said"), SETTINGS)
def test_a_setting_that_cannot_work(
    place: str, name: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--devices", "cpu", BROKEN, place, name, value]) == 2
    line = the_line(capsys)
    assert line.startswith("quorate: ")
    assert said in line
    assert "; " in line or place == "fit"  # what to do


@pytest.mark.parametrize("option", AT_THE_COMMAND, ids=" ".join)
def test_a_mistake_at_the_command(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *option, BROKEN, "nothing"]) == 2
    line = the_line(capsys)
    assert all(part in line for part in AT_THE_COMMAND[option]), line


@pytest.mark.parametrize(
    ("typed", "line"),
    [row for rows in MISTAKES.values() for row in rows],
    ids=lambda text: text[:60],
)
def test_a_mistake_ends_in_the_line_that_the_docs_have(
    typed: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    there = sorted(tmp_path.rglob("*"))
    assert main(shlex.split(typed)[1:]) == 2
    assert the_line(capsys) == line
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)] == there


def test_more_shards_than_rows_of_the_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--devices", "cpu", "--shards", "21", BROKEN, "big-batch"]) == 2
    assert "shards: got 21, expected at most the 20 rows of the dataset" in the_line(capsys)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="ranks are forked")
def test_a_loop_of_ranks_that_is_to_be_looked_at(tmp_path: Path) -> None:
    """As verify and bench do: the ranks' part of it would have been lost, and not a word said."""
    engine = ("--engine", "collective", "--workers", "2")  # of a process's first loop
    record = ("--record", str(tmp_path), "--record-updates", "2")
    ended = run(command(BROKEN, "vector-loss", options=(*engine, *record)))
    assert ended.code == 2
    assert "got 'collective', expected processes or towers here" in ended.err
    assert len(ended.err.splitlines()) == 1


def test_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "nowhere.py"]) == 2
    assert "script: got 'nowhere.py'" in the_line(capsys)


@pytest.mark.parametrize("name", ["x" * 5000, "y/" * 3000], ids=["name", "path"])
@pytest.mark.parametrize("typed", WITH_PATHS)
def test_a_path_too_long_for_the_system_is_refused_in_one_line(
    typed: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([word.format(PATH=name, BROKEN=BROKEN) for word in typed.split()]) == 2
    line = the_line(capsys)
    assert line.startswith("quorate: ")
    assert name[:100] in line
    assert not [*tmp_path.iterdir()]


def test_inspecting_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert f"no checkpoint in {tmp_path}" in the_line(capsys)


def test_the_command_itself_exits_with_2_and_one_line() -> None:
    command = [sys.executable, "-m", "quorate", "run", "--devices", "cpu", BROKEN, "vector-loss"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_an_exception_of_the_user_ends_in_one_traceback_and_exit_code_1() -> None:
    command = [sys.executable, "-m", "quorate", "run", "--devices", "cpu", BROKEN, "user-error"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert "RuntimeError: shape '[7, 7, 7]' is invalid" in ended.stderr
    assert "in loss" in ended.stderr
    assert "shard 0 of step 0, rows [" in ended.stderr
