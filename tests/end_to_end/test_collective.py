"""Ranks of a collective: the bits of the other engines, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import psutil
import pytest
import torch.distributed
from support.references import References
from support.runs import SCRIPTS, Ended, command, digests, inspected, run

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="ranks are forked"),
]
RANKS = str(SCRIPTS / "ranks.py")


def options(ranks: int) -> tuple[str, ...]:
    return ("--engine", "collective", "--workers", str(ranks))


def ranks(what: str, number: int, run_dir: Path | None = None, optimizer: str = "adam") -> Ended:
    more = () if run_dir is None else ("--run-dir", str(run_dir))
    return run(command("ranks.py", what, optimizer, options=(*options(number), *more)))


def said_digest(ended: Ended) -> str:
    assert ended.code == 0, ended.said
    (line,) = re.findall(r"^digest (\w+)$", ended.out, re.MULTILINE)
    return str(line)


def torchrun(*words: str, number: int = 2, restarts: int = 0) -> Ended:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(number)]
    start += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    # Its rendezvous is on a port that is free: two tests may run side by side.
    start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return run([*start, RANKS, *words])


def tower(what: str, optimizer: str, references: References) -> str:
    reference = references.on_a_tower("ranks.py", what, optimizer)
    (line,) = re.findall(r"^digest (\w+)$", reference.out, re.MULTILINE)
    return str(line)


def test_two_ranks_have_the_bits_of_a_tower(references: References) -> None:
    ended = ranks("plain", 2)
    assert said_digest(ended) == tower("plain", "adam", references)
    if sys.platform == "linux":
        met = "2 ranks met through a file; gloo listens on lo, 127.0.0.1 (this machine alone)"
        assert met in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("shards", [4, 5, 8])
def test_one_digest_on_any_number_of_ranks(
    shards: int, references: References, tmp_path: Path
) -> None:
    bits = ("--shards", str(shards))
    expected = references.on_a_tower("everything.py", options=bits).digests
    for number in (1, 2, 3, 4):
        run_dir = tmp_path / str(number)
        words = (*options(number), *bits, "--run-dir", str(run_dir))
        ended = run(command("everything.py", options=words))
        assert ended.code == 0, ended.said
        assert digests(run_dir) == expected, number
        assert inspected(run_dir)["engine"] == "collective"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "optimizer"),
    [
        *product(["plain", "change", "nan"], ["sgd", "asgd", "adafactor"]),
        ("change", "tensors"),
    ],
)
def test_each_optimizer_and_whatever_callbacks_change(
    what: str, optimizer: str, references: References
) -> None:
    assert said_digest(ranks(what, 3, optimizer=optimizer)) == tower(what, optimizer, references)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ranks read each other's memory by /proc")
def test_ranks_of_a_host_compute_from_one_memory(tmp_path: Path) -> None:
    said = []
    for engine in (("--engine", "towers", "--workers", "1"), options(3)):
        ended = run(command("ranks.py", "one", "adam", str(tmp_path), options=engine))
        said.append(said_digest(ended))
    assert len(set(said)) == 1
    (memory,) = {(tmp_path / f"rank-{rank}").read_text() for rank in range(3)}
    assert int(memory) > 0
    assert {(tmp_path / f"threads-{rank}").read_text() for rank in range(3)} == {"1"}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sam", "wolfe"])
def test_optimizers_that_ask_for_a_gradient_again(
    optimizer: str, references: References, tmp_path: Path
) -> None:
    expected = references.on_a_tower("ranks.py", "plain", optimizer).digests
    for number in (1, 2):
        run_dir = tmp_path / str(number)
        ended = ranks("plain", number, run_dir, optimizer)
        assert ended.code == 0, ended.said
        assert "in doubt" not in ended.out
        assert digests(run_dir) == expected, number
    words = (optimizer, str(tmp_path / "raised"))  # which is saved every second step
    raised = run(command("ranks.py", "again", *words, options=options(3)))
    assert (raised.code, raised.err.count("Traceback")) == (1, 1)
    assert "ValueError: mine" in raised.err
    resumed = run(command("ranks.py", "plain", *words, options=options(3)))
    assert "resumed step 2" in resumed.out
    assert digests(tmp_path / "raised") == expected


@pytest.mark.slow
def test_one_digest_whatever_the_way_of_the_exchange(
    references: References, tmp_path: Path
) -> None:
    """Many small buckets, and an optimizer that every rank has the whole state of."""
    bits = ("--shards", "8")
    expected = references.on_a_tower("everything.py", options=bits).digests
    for number, words in enumerate([("--bucket-mb", "0.25"), ("--no-shard-optimizer",)]):
        run_dir = tmp_path / str(number)
        more = (*options(3), *bits, *words, "--run-dir", str(run_dir))
        ended = run(command("everything.py", options=more))
        assert ended.code == 0, ended.said
        assert digests(run_dir) == expected, words


@pytest.mark.slow
def test_the_native_exchange_says_that_its_bits_depend_on_the_ranks(tmp_path: Path) -> None:
    native = (*options(2), "--exchange", "native")
    ended = run(command("ranks.py", "plain", "adam", options=(*native, "--run-dir", str(tmp_path))))
    assert ended.code == 0, ended.said
    assert "in an order that depends on the number of ranks, here 2" in ended.out
    assert inspected(tmp_path)["doubts"]
    strict = run(command("ranks.py", "plain", "adam", options=(*native, "--strict")))
    assert strict.code != 0
    assert "exchange='native'" in strict.err


@pytest.mark.slow
def test_it_goes_on_on_other_engines_and_comes_back(references: References, tmp_path: Path) -> None:
    """SIGTERM to rank 1 ends a step, and a tower goes on; or to a tower, and ranks go on."""
    expected = references.on_a_tower("ranks.py", "plain", "adam").digests
    one, other = tmp_path / "one", tmp_path / "other"
    ended = ranks("term", 3, one)
    assert ended.code == 128 + signal.SIGTERM, ended.said  # as one process would end
    assert "stopped after step 4: rank 1: SIGTERM" in ended.out
    assert inspected(one)["global_step"] == 4
    towers = ("--engine", "towers", "--workers", "2")
    again = run(command("ranks.py", "plain", "adam", options=(*towers, "--run-dir", str(one))))
    assert again.code == 0, again.said
    assert digests(one) == expected
    words = (*towers, "--run-dir", str(other))
    assert run(command("ranks.py", "term0", "adam", options=words)).code != 0
    assert 0 < inspected(other)["global_step"] < 8
    last = ranks("plain", 2, other)
    assert last.code == 0, last.said
    assert digests(other) == expected


@pytest.mark.slow
def test_callbacks_reach_the_state_of_the_optimizer(references: References) -> None:
    for optimizer in ("adam", "sgd"):
        ended = ranks("moments", 3, optimizer=optimizer)
        assert said_digest(ended) == tower("moments", optimizer, references)
    refused = ranks("moments", 2, optimizer="adafactor")
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)
    assert "optimizer: the state of Adafactor was changed between updates" in refused.err


@pytest.mark.slow
def test_working_copies_of_another_precision(references: References) -> None:
    """The model itself computes in bf16 on a rank, and its parameters stay what they are."""
    bits = ("--precision", "bf16")
    expected = references.on_a_tower("ranks.py", "change", "adam", options=bits).digests
    ended = run(command("ranks.py", "change", "adam", options=(*options(2), *bits)))
    assert ended.code == 0, ended.said
    assert "in doubt" not in ended.out
    assert said_digest(ended) in expected


@pytest.mark.slow
def test_what_another_rank_alone_comes_to_is_said_and_kept(tmp_path: Path) -> None:
    """A doubt of rank 1's own, after the first step; and what only a comparison shows."""
    writes = ranks("writes", 2, tmp_path / "writes")
    assert writes.code == 0, writes.said
    (doubt,) = inspected(tmp_path / "writes")["doubts"]
    assert doubt.startswith("on rank 1, forward writes last.bias (Linear) now")
    assert writes.out.count(f"same bits: no, because {doubt}") == 1
    assert f"different bits in another run (1 reason): {doubt}" in writes.out
    logged = (tmp_path / "writes" / "metrics.jsonl").read_text()
    assert "on rank 1, forward writes last.bias" in logged
    late = ranks("late", 2, tmp_path / "late", "sam")  # after the last sum that it hands over
    assert late.code == 0, late.said
    *_, doubt = inspected(tmp_path / "late")["doubts"]
    assert doubt.startswith("on rank 1, forward writes last.bias (Linear) now")
    assert late.out.count(f"same bits: no, because {doubt}") == 1
    other = ranks("other", 2, tmp_path / "other")
    assert other.code == 0, other.said
    (doubt,) = inspected(tmp_path / "other")["doubts"]
    assert doubt.startswith("workers 0 and 1 give different results for the same shard")
    strict = run(command("ranks.py", "other", "adam", options=(*options(2), "--strict")))
    assert strict.code == 1
    assert "strict: the same bits cannot be kept, because workers 0 and 1" in strict.err
    assert "step 2/" not in strict.out


@pytest.mark.slow
def test_it_evaluates_before_and_trains_on_alone(references: References) -> None:
    ended = ranks("around", 2)
    assert said_digest(ended) == tower("plain", "adam", references)
    assert "because the ranks ended with the first loop" in ended.out


@pytest.mark.slow
def test_whatever_ends_a_rank_ends_all_and_is_explained(tmp_path: Path) -> None:
    own = tmp_path / "tmp"  # that of no other test
    own.mkdir()

    def ends(what: str, *more: str) -> Ended:
        words = command("ranks.py", what, "adam", options=(*options(3), *more))
        env = {**os.environ, "TMPDIR": str(own)}
        done = subprocess.run(
            words, capture_output=True, text=True, env=env, timeout=60, check=False
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    raised = ends("raise", "--run-dir", str(tmp_path / "raise"))
    assert raised.code == 1
    assert "ValueError: mine" in raised.err
    assert "quorate: worker 1 (cpu), step 2, shard 1, rows [54, 55, 56, 57, 58, 59]" in raised.err
    assert inspected(tmp_path / "raise")["global_step"] == 2
    killed = ends("kill")
    assert (killed.code, len(killed.err.splitlines())) == (1, 1)
    assert "quorate: rank 1 was killed by signal 9 (SIGKILL)" in killed.err
    lost = ends("kill0")
    assert lost.code == -signal.SIGKILL
    time.sleep(1.0)
    left = [p for p in psutil.process_iter(["environ"]) if _has(p, "TMPDIR", str(own))]
    assert [process.cmdline() for process in left] == []
    assert [path.name for path in own.glob("quorate-*")] == []


def _has(process: psutil.Process, name: str, value: str) -> bool:
    return (process.info["environ"] or {}).get(name) == value


@pytest.mark.slow
def test_wrong_set_ups_are_named_before_the_first_step() -> None:
    found = {what: ranks(what, 3) for what in ("model", "data", "rows", "shards")}
    for what, ended in found.items():
        assert ended.code == 2, what
        assert "step 1/" not in ended.out, what
        assert "Traceback" not in ended.err, what
    assert re.search(r"rank [12]: last.weight of the model is \(4, 400\)", found["model"].err)
    assert "rank 1 differs from rank 0 in the first rows of the dataset" in found["data"].err
    assert "got 95 rows, expected 96" in found["rows"].err
    assert "rank 1 differs from rank 0 in shards: got 5, expected 4" in found["shards"].err
    rule = run(command("ranks.py", "plain", "adam", options=(*options(2), "--update", "async")))
    assert rule.code == 2
    assert "update: got 'async', expected sync, as the ranks" in rule.err


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_starts_them_anew(
    references: References, tmp_path: Path
) -> None:
    expected = tower("plain", "adam", references)
    run_dir = str(tmp_path / "run")
    ended = torchrun("plain", "adam", run_dir)
    assert said_digest(ended) == expected
    if sys.platform == "linux":
        assert "gloo listens on lo, 127.0.0.1 (this machine alone)" in ended.out
    ended = torchrun("kill", "adam", run_dir, "fresh", number=3, restarts=2)
    assert said_digest(ended) == expected
    assert "resumed step 2" in ended.said
    assert ended.said.count(f"moved the earlier run in {run_dir} to ") == 1  # of the first start
    size = torchrun("plain", "adam", number=1)
    assert said_digest(size) == expected


SMALL = """
import pathlib, sys, time
import quorate, torch
data = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
%s
trainer = quorate.Trainer(
    lambda: torch.nn.Linear(4, 2), lambda m, b: m(b).square().mean(), batch_size=12, shards=4,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
)
%s
trainer.fit(data, epochs=1)
"""


def small(folder: Path, before: str = "", between: str = "") -> Path:
    script = folder / "small.py"
    script.write_text(SMALL % (before, between))
    return script


def test_nothing_is_left_of_ranks_that_had_not_met(tmp_path: Path) -> None:
    here, own = tmp_path / "here", tmp_path / "tmp"
    own.mkdir()
    waits = "if quorate.is_worker(): pathlib.Path(sys.argv[1]).touch(); time.sleep(100)"
    words = command(small(tmp_path, waits), str(here), options=options(2))
    first = subprocess.Popen(words, env={**os.environ, "TMPDIR": str(own)})
    try:
        until = time.monotonic() + 100
        while not here.exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert here.exists()
    finally:
        first.kill()
        first.wait()
    assert [path.name for path in own.glob("quorate-*")] == []


def test_a_call_that_is_refused_is_not_the_loop_of_the_ranks(tmp_path: Path) -> None:
    wrong = "try: trainer.fit(data, steps=0)\nexcept Exception as error: print(error)"
    ended = run(command(small(tmp_path, between=wrong), options=options(2)))
    assert ended.code == 0, ended.said
    assert "steps: got 0" in ended.out
    assert "2 ranks met through a file" in ended.out
    assert "towers" not in ended.out


@pytest.mark.slow
def test_a_refusal_is_shown_once_and_is_in_the_report_of_torchrun(tmp_path: Path) -> None:
    script = small(tmp_path)
    script.write_text(script.read_text().replace("shards=4", "shards=4, update='asynk'"))
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ended = run([*start, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script)])
    lines = [line.strip() for line in ended.err.splitlines()]
    assert len([line for line in lines if line.startswith("quorate: update: got 'asynk'")]) == 1
    assert [line for line in lines if line.startswith("traceback : quorate: update: got 'asynk'")]


@pytest.mark.slow
def test_too_few_descriptors_for_ranks_are_one_line(tmp_path: Path) -> None:
    words = command(small(tmp_path), options=options(3))
    limited = ["bash", "-c", 'ulimit -n 40; exec "$@"', "bash", *words]
    ended = subprocess.run(limited, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1), ended.stderr
    assert "descriptors: 3 ranks need" in ended.stderr


MODELS = {
    "teacher": (
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.student = torch.nn.Linear(4, 2)\n"
        "        self.teacher = torch.nn.Linear(4, 2).requires_grad_(False)\n"
        "    def forward(self, x):\n"
        "        for q, k in zip(self.student.parameters(), self.teacher.parameters()):\n"
        "            k.data.mul_(0.9).add_(q.data, alpha=0.1)\n"
        "        return self.student(x) - self.teacher(x).detach() - 1\n"
    ),
    "scattered": (
        "rows = torch.randint(0, 50, (200_000,), generator=torch.Generator().manual_seed(1))\n"
        "values = torch.randn(200_000, generator=torch.Generator().manual_seed(2))\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.w = torch.nn.Linear(4, 50), torch.nn.Parameter(torch.randn(50))\n"
        "    def forward(self, x):\n"
        "        added = values * self.w[rows]\n"
        "        sums = torch.zeros(50).index_put((rows,), added, accumulate=True)\n"
        "        return self.first(x) + sums * 1e-3\n"
    ),
    "lazy": (
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first = torch.nn.Linear(4, 2)\n"
        "        self.register_buffer('scale', None, persistent=False)\n"
        "    def forward(self, x):\n"
        "        if self.scale is None:\n"
        "            self.scale = torch.full((4,), 0.5)\n"
        "        return self.first(x * self.scale)\n"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_that_ranks_took_for_others(name: str, tmp_path: Path) -> None:
    """Frozen weights that forward moves, an operator in any order, a buffer that comes late."""
    script = small(tmp_path, MODELS[name])
    script.write_text(script.read_text().replace("lambda: torch.nn.Linear(4, 2)", "Net"))
    found = []
    for engine in (("--engine", "towers", "--workers", "1"), options(2)):
        run_dir = tmp_path / engine[1]
        more = ("--threads", "2", "--run-dir", str(run_dir))
        ended = run(command(script, options=(*engine, *more)))
        assert ended.code == 0, ended.said
        facts = inspected(run_dir)
        found.append((facts["digest"], facts["doubts"]))
    assert found[0] == found[1]
