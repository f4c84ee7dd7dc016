"""quorate verify on real runs: each class of fault is named, and no sound script accused."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.at_the_command import ended
from support.keys import keys_of
from support.messages import expect_message
from support.strangers import SCRIPT as STRANGER
from support.warm_child import WarmRuns

from quorate.__main__ import main

SCRIPT = Path(__file__).parents[1] / "scripts" / "verified.py"

FEW = ("--no-towers", "--no-resume", "--no-kill")
ON_RESUME = ("--no-towers", "--no-kill")
ON_TOWERS = ("--no-resume", "--no-kill")
ON_KILL = ("--no-towers", "--no-resume")
ON_LATE_KILL = (*ON_KILL, "--updates", "5")
STAGED = (*FEW, "--workers", "1", "--shards", "4", "--devices", "cpu+cpu", "--split", "noise")


@pytest.fixture
def verify(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> WarmRuns:
    """Return the command, with an empty folder for messages between scripts."""
    monkeypatch.setenv("VERIFIED_FOLDER", str(tmp_path))
    monkeypatch.delenv("VERIFIED_FIRST", raising=False)
    return WarmRuns("verify", monkeypatch, capfd)


# --- a shard twice --------------------------------------------------------------------------------

# Differences between two computations by the same worker: parts of the output.
TWICE = {
    "clock": (
        "aten.mul.Tensor received 1.",
        "in module 'noise' (Noise)",
        "return x * (1 + time.perf_counter() % 1)",
    ),
    "generator": ("aten.rand.generator drew from a generator that the script made", "torch.rand("),
    "memory": ("aten.empty.memory_format returned uninitialised memory", "x + torch.empty(8)"),
    "kernel": ("verified.lottery.default", "in module 'noise' (Noise)"),
    "loss": ("aten.mul.Tensor received 1.", "return found * (1 + time.perf_counter() % 1)"),
    "asked": ("rows are not repeatable", "of the dataset had other content the second time"),
    "collate": ("batches are not repeatable: made twice by worker 0",),
}


@pytest.mark.parametrize("how", TWICE)
def test_what_differs_when_it_is_done_twice(how: str, verify: WarmRuns) -> None:
    verify.here = how != "kernel"  # torch takes the library of an operator once per process
    words = ("--engine", "towers", "--workers", "1", "--shards", "4", "--updates", "1", *FEW)
    said = verify(*words, str(SCRIPT), how, code=1)
    for part in TWICE[how]:
        assert part in said, said
    assert ("verified.py:" in said) == (how not in ("asked", "collate"))


def test_what_is_said_of_a_sound_script(verify: WarmRuns) -> None:
    verify.here = True
    expect_message(verify("--engine", "towers", "--updates", "4", str(SCRIPT), "clean", code=0))


def test_a_recorded_run_computes_what_others_do(tmp_path: Path) -> None:
    losses = {}
    (tmp_path / "record").mkdir()
    record = ("--record", str(tmp_path / "record"), "--record-updates", "5")
    for name, more in {"plain": (), "recorded": record}.items():
        options = ("--engine", "towers", "--workers", "2", "--shards", "4", *more)
        words = ["run", *options, "--run-dir", str(tmp_path / name), str(SCRIPT), "clean"]
        with pytest.raises(SystemExit) if more else nullcontext():
            main(words)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    assert len(losses["recorded"]) == 5
    assert losses["plain"][:5] == losses["recorded"]


# --- limits ---------------------------------------------------------------------------------------


def test_what_the_limit_cuts_off_is_said_and_what_was_compared_stays(
    verify: WarmRuns, capfd: pytest.CaptureFixture[str]
) -> None:
    verify.here, verify.over_in = True, 3
    words = ("--updates", "3", "--workers", "1,2", "--limit", "1e5", "--json", "--engine", "towers")
    assert main(["verify", *words, str(SCRIPT), "clean"]) == 2
    shown = capfd.readouterr()
    record = json.loads(shown.out)
    assert (record["same_bits"], record["is_complete"]) == (True, False)
    assert [run["run"] for run in record["runs"]] == ["1 worker", "2 workers"]
    expect_message("\n".join([shown.err, *record["lines"]]))
    expect_message(keys_of(record))


# --- runs in all ways -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sound_script_in_all_ways(verify: WarmRuns) -> None:
    expect_message(verify("--updates", "4", "--workers", "1,2", str(SCRIPT), "clean", code=0))


def test_a_rule_that_depends_on_timing_is_refused(verify: WarmRuns) -> None:
    verify.here = True
    said = verify("--engine", "towers", "--update", "async", str(SCRIPT), "clean", code=2)
    assert "verify the script with --update sync" in said


IN_A_SET = """
import torch, quorate
from torch.utils.data import TensorDataset
NAMES = {"alpha", "beta", "gamma", "delta", "epsilon"}
def loss(model, batch):
    scale = sum(len(name) * 0.1**place for place, name in enumerate(NAMES))
    return (model(batch[0]) * scale).square().mean()
trainer = quorate.Trainer(lambda: torch.nn.Linear(3, 1), loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01), batch_size=8, shards=2)
trainer.fit(TensorDataset(torch.ones(24, 3)), epochs=1)
"""


@pytest.mark.slow
def test_the_order_of_a_set_is_named_and_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the command itself: its runs have different hash seeds."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "script.py").write_text(IN_A_SET)
    words = (*FEW, "--engine", "towers", "--workers", "1", "--updates", "1")
    found = ended("verify", *words, str(tmp_path / "script.py"), TMPDIR=str(tmp_path / "temporary"))
    assert (found.returncode, found.stderr) == (1, "")
    line = "same bits: no: PYTHONHASHSEED decides: 1 worker again and 1 worker are the same"
    assert line in found.stdout
    assert list((tmp_path / "temporary").glob("quorate*")) == []


# --- classes of faults ----------------------------------------------------------------------------

# Breaks of the promise: the script, the ways, and the words required in the output.
FOUND: dict[str, tuple[Path, tuple[str, ...], tuple[str, ...]]] = {
    "counter_attribute": (STRANGER, FEW, ("because calls (counter_attribute) changes",)),
    "cached_by_first_batch": (STRANGER, FEW, ("return self.net(x - self.mean)",)),
    "process": (
        SCRIPT,
        FEW,
        ("on the other, which no operator computed", "return x * self.number"),
    ),
    "rank": (SCRIPT, FEW, ("row 17 of the dataset has other content: what row 20 has",)),
    "optimizer": (SCRIPT, ON_RESUME, ("Warming.clock",)),
    "rows": (SCRIPT, ON_RESUME, ("has different values", "row ")),
    "rate": (SCRIPT, FEW, ("after update 3", "the learning rate of the next update is")),
    "callback": (SCRIPT, ON_RESUME, ("resumed after update 2 part in update 3", "last.weight")),
    # When the replaced worker meets the file hangs on the moment.
    "late": (SCRIPT, ON_LATE_KILL, ("one killed part in update", "worker was killed only")),
    # All runs compute the same, but not the values of a model in one piece.
    "stage": (SCRIPT, STAGED, ("gradient of first.weight through the stages", "shards 0-3")),
}
# Breaks of the promise elsewhere, carried here, in the ways in which a break would show.
SOUND: dict[str, tuple[str, ...]] = {
    "counter_in_group": ON_RESUME,
    "embedding_max_norm": ON_KILL,
    "penalty_over_the_global_model": ON_TOWERS,
    "two_threads_and_index_put": (*FEW, "--threads", "2"),
}
# Seen on towers too: no process is started.
HERE = ("counter_attribute", "cached_by_first_batch", "optimizer", "rows", "callback")
HERE += ("rate", "counter_in_group", "two_threads_and_index_put")


def verified(verify: WarmRuns, name: str, ways: tuple[str, ...], script: Path, code: int) -> str:
    verify.here = name in HERE
    engine = ("--engine", "towers") if verify.here else ()
    words = ("--workers", "1,2", "--updates", "3", *engine, *ways, str(script), "--", name)
    return verify(*words, code=code)


@pytest.mark.parametrize("name", FOUND)
def test_what_breaks_the_promise_is_named(name: str, verify: WarmRuns) -> None:
    script, ways, named = FOUND[name]
    said = verified(verify, name, ways, script, code=1)
    for part in named:
        assert part in said, said


@pytest.mark.parametrize("name", SOUND)
def test_nobody_is_accused_where_the_promise_is_kept(name: str, verify: WarmRuns) -> None:
    said = verified(verify, name, SOUND[name], STRANGER, code=0)
    assert "same bits on 1 worker, 2 workers" in said or "same bits on 1 worker and 2" in said
    if name == "penalty_over_the_global_model":
        assert "note: it cannot be run on towers" in said
        assert "'net.parameters' in loss (copies.py:22)" in said
