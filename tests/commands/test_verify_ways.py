"""quorate verify: runs on towers, resumed and with a kill; and each class of fault by its name."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.strangers import catalogue
from support.warm_child import child_run

from quorate.commands.main import main
from quorate.commands.verify import runs as verify_runs
from quorate.commands.verify.differences import RESTORED, Difference, first_difference
from quorate.commands.verify.recorder import Kill, RecordedChannel
from quorate.commands.verify.records import EndRecord, Recording, TwiceRecord, UpdateRecord
from quorate.commands.verify.verdict import Run, Way, verdict
from quorate.coordination.protocol import Compute, Discard, Done, Joined, Left, Replace
from quorate.coordination.protocol import Event as ProtocolEvent
from quorate.replica.witness.calls import CallRecord

SCRIPTS = Path(__file__).parents[1]
SCRIPT = SCRIPTS / "scripts" / "verified.py"
STRANGER = SCRIPTS / "strangers" / "stranger.py"
LIMIT_S = 100
COMPILES_S = 600  # a run that compiles: both workers do, each shape, beside all that is tried
EVERY = int(os.environ.get("QUORATE_TEST_STRANGERS", "27"))  # of so many further cases one; 1: all

# --- the verdict over made records ----------------------------------------------------------------


def recording(*weights: str, doubts: Sequence[str] = ()) -> Recording:
    updates = [UpdateRecord(n, n - 1, 0.1, {"last.weight": w}) for n, w in enumerate(weights)]
    end = EndRecord(len(weights) - 1, "", list(doubts))
    return Recording(facts={"shards": 2, "steps_per_epoch": 2}, updates=updates, end=end)


def run(label: str, found: Recording, way: Way = Way.PLAIN, **more: Any) -> Run:
    return Run(label, 1, found, 0, "", way, **more)


PLAIN = run("1 worker", recording("a", "b", "c", "d", "e"))


def stopped(*weights: str) -> Run:
    return run("3 towers", recording(*weights), Way.TOWERS, is_part=True)


def resumed(*weights: str) -> Run:
    found = recording(*weights).moved(2)
    return run("2 workers resumed", found, Way.RESUMED, first=2, is_part=True)


def test_a_run_that_is_stopped_and_resumed_is_compared_in_parts() -> None:
    said = verdict([PLAIN, stopped("a", "b", "c"), resumed("c", "d", "e")])
    assert said.is_same
    assert said.lines[0] == (
        "same bits on 1 worker, 3 towers and 2 workers resumed, after each of 4 updates of 2 shards"
    )


def test_what_a_checkpoint_does_not_hold() -> None:
    run_after = resumed("o", "p", "q")
    found = first_difference(PLAIN.recording.part(2, 4), run_after.recording)
    assert found == Difference(RESTORED, 2, parameter="last.weight", parameters=1)
    said = verdict([PLAIN, stopped("a", "b", "c"), run_after])
    assert not said.is_same
    assert "does not begin with what 1 worker has after update 2" in said.lines[0]
    assert "it shows after a resume only" in said.lines[2]


def test_a_difference_before_the_stop_is_not_blamed_on_the_resume() -> None:
    said = verdict([PLAIN, stopped("a", "b", "o"), resumed("o", "p", "q")])
    assert not said.is_same
    assert said.lines[0] == "same bits: no: 1 worker and 3 towers part in update 2:"
    assert "it shows on towers only" in said.lines[2]
    assert not any("after a resume" in line for line in said.lines)


def test_a_resumed_run_that_ends_early() -> None:
    said = verdict([PLAIN, stopped("a", "b", "c"), resumed("c", "d")])
    assert said.lines[:2] == [
        "same bits: no: 1 worker and 2 workers resumed part in update 4:",
        "  one of them has no such update: it ended before",
    ]


def test_what_shows_on_any_number_of_workers_is_not_blamed_on_a_kill() -> None:
    other = recording("a", "b", "o", "p", "q")
    runs = [PLAIN, run("2 workers", other)]
    killed = run("3 workers with one killed", other, Way.KILLED, first=2)
    assert any("it shows after a worker was killed only" in x for x in verdict([PLAIN, killed])[1])
    assert not any("it shows" in line for line in verdict([*runs, killed]).lines)


def test_a_doubt_is_a_verdict_also_where_digests_are_equal() -> None:
    doubted = replace(PLAIN.recording, end=EndRecord(4, "", ["the clock"]))
    said = verdict([PLAIN, run("2 workers", doubted), run("3 workers", doubted)])
    assert not said.is_same
    assert said.lines[0] == (
        "same bits: no: digests are the same in all of these runs, and may not be in others:"
    )
    assert said.lines[1] == "  because the clock (so 2 workers and 3 workers)"


def test_the_cause_comes_before_what_follows_from_it() -> None:
    """A shard that is another the second time is named first, and the verdict stands once."""
    names = ("number", "aten.mul.Tensor", "", "", "", "", "")
    call = CallRecord(*names, ("1", "2"), is_random=False, own_generator=False, in_backward=False)
    twice = TwiceRecord(0, "cpu", 0, 0, [], 9, ["loss"], call)
    other = replace(recording("a", "b", "o", "p", "q", doubts=["the clock"]), twice=[twice])
    said = verdict([PLAIN, run("2 workers", other)])
    assert said.lines[0].startswith("same bits: no: computing is not repeatable: done twice by")
    assert "aten.mul.Tensor received 1, then 2" in said.lines[1]
    assert [line.startswith("same bits") for line in said.lines].count(True) == 1
    places = [
        next(n for n, line in enumerate(said.lines) if words in line)
        for words in ("part in update 2", "runs themselves doubt", "because the clock")
    ]
    assert places == sorted(places)


def test_what_is_the_same_under_one_hash_seed_is_blamed_on_hashes() -> None:
    other = run("2 workers", recording("a", "b", "o", "p", "q"))
    alike = PLAIN._replace(label="2 workers under one hash seed", way=Way.HASHED)
    said = verdict([PLAIN, other, alike])
    assert not said.is_same
    assert said.lines[0].startswith("same bits: no: PYTHONHASHSEED decides")
    assert "sorted(" in said.lines[0]
    assert not any(alike.label in line for line in said.lines[1:])
    said = verdict([PLAIN, other, other._replace(way=Way.HASHED)])
    assert not any("PYTHONHASHSEED" in line for line in said.lines)


# --- the kill -------------------------------------------------------------------------------------


class Scripted:
    """A channel whose events are given beforehand; None: nothing within the time."""

    def __init__(self, events: Sequence[ProtocolEvent | None]) -> None:
        self.events = list(events)
        self.sent: list[object] = []

    def send(self, effect: object) -> None:
        self.sent.append(effect)

    def receive(self, timeout_s: float | None) -> ProtocolEvent | None:
        return self.events.pop(0)


class Nothing:
    def goes_on(self) -> None:
        pass


def test_others_wait_for_the_one_in_the_place_of_the_killed() -> None:
    left = Left(0, "killed")
    inner = Scripted([Done(1, 3, 1), left, None, Joined(0), None, Done(0, 3, 0)])
    channel: Any = RecordedChannel(inner, Nothing(), Kill(3))  # type: ignore[arg-type]
    channel.send(Compute(0, 2, 0, "home shard", (0, 3), None))
    assert ended(inner) == []  # too early
    for worker in (0, 1):
        channel.send(Compute(worker, 3, worker, "home shard", (worker, 3), None))
    assert ended(inner) == [0]  # once, by the transport, which knows the process
    assert [channel.receive(None) for _ in range(2)] == [left, Joined(0)]
    channel.send(Compute(0, 3, 0, "home shard", (0, 3), None))
    assert [channel.receive(1.0) for _ in range(3)] == [None, Done(0, 3, 0), Done(1, 3, 1)]


def ended(inner: Scripted) -> list[int]:
    return [effect.worker for effect in inner.sent if isinstance(effect, Replace)]


def test_the_answer_of_a_worker_that_has_ended_is_forgotten() -> None:
    left = Left(0, "killed")
    inner = Scripted([Done(0, 0, 0), left, Done(1, 0, 1)])
    channel: Any = RecordedChannel(inner, Nothing())  # type: ignore[arg-type]
    for worker in (0, 1):
        channel.send(Compute(worker, 0, worker, "home shard", (worker, 3), None))
    # The coordinator has its shard computed by another: two results it would not bear.
    assert [channel.receive(None) for _ in range(2)] == [left, Done(1, 0, 1)]
    assert inner.sent[2:] == [Discard(0, 0, 0)]


def test_of_a_run_of_shards_all_answers_are_forgotten() -> None:
    left = Left(0, "killed")
    inner = Scripted([Done(0, 0, 0), left])
    channel: Any = RecordedChannel(inner, Nothing())  # type: ignore[arg-type]
    channel.send(Compute(0, 0, 0, "home shard", (0, 2), None, count=3))
    channel.send(Compute(1, 0, 3, "home shard", (1, 2), None))
    assert channel.receive(None) == left
    assert inner.sent[2:] == [Discard(0, 0, 0, 3)]


# --- real runs ------------------------------------------------------------------------------------


@pytest.fixture
def verify(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str]]:
    """The command; its runs are processes that need not import torch."""

    def limit_s(options: Mapping[str, Any]) -> float:
        return COMPILES_S if options.get("compile") else LIMIT_S

    monkeypatch.setattr(verify_runs, "child_run", child_run(limit_s))
    monkeypatch.setenv("VERIFIED_FOLDER", str(tmp_path))

    def command(*words: str) -> tuple[int, str]:
        code = main(["verify", *words])
        said = capfd.readouterr()
        return code, said.out + said.err

    return command


Verify = Callable[..., tuple[int, str]]


@pytest.mark.slow
def test_a_sound_script_in_all_ways(verify: Verify) -> None:
    words = ("--updates", "4", "--workers", "1,2", str(SCRIPT), "clean")
    code, said = verify(*words)
    assert code == 0, said
    for line in (
        "2 towers stopped after update 2: 2 updates of 2 shards",
        "1 worker resumed after update 2: 2 updates of 2 shards",
        "2 workers with one killed: 4 updates of 2 shards",
    ):
        assert line in said


@pytest.mark.slow
def test_what_the_limit_cuts_off_is_said_and_what_was_compared_stays(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    looks = iter([None, None])  # that are within the limit: of the two plain runs

    def require_time(self: verify_runs.Limit) -> None:
        if next(looks, self) is self:
            raise verify_runs.OverLimitError

    monkeypatch.setattr(verify_runs.Limit, "require_time", require_time)
    words = ("--updates", "3", "--workers", "1,2", "--limit", "50", "--json", str(SCRIPT), "clean")
    assert main(["verify", *words]) == 2
    shown = capfd.readouterr()
    record = json.loads(shown.out)
    assert (record["same_bits"], record["is_complete"]) == (True, False)
    assert [run["run"] for run in record["runs"]] == ["1 worker", "2 workers"]
    assert record["lines"][0].startswith(
        "same bits on 1 worker and 2 workers, after each of 3 updates"
    )
    assert shown.err.splitlines()[:2] == [
        "2 workers: 3 updates of 2 shards",
        "1 worker: 3 updates of 2 shards",
    ]
    assert shown.err.splitlines()[-1] == (
        "quorate: the limit of 50 s was over in the run on 2 towers stopped after update 2: "
        "nothing is said of it, nor of those after it; raise --limit, or lower --updates"
    )


def test_a_limit_that_is_over_at_once_ends_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["verify", "--limit", "1e-6", "--workers", "1,2", str(SCRIPT), "clean"]) == 2
    assert capfd.readouterr().err == (
        "quorate: the limit of 1e-06 s was over in the run on 2 workers, before two runs could be "
        "compared; raise --limit, or lower --updates\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_shows_after_a_resume_only(verify: Verify) -> None:
    words = ("--updates", "3", "--workers", "1,2", "--no-kill", str(SCRIPT), "callback")
    code, said = verify(*words)
    assert code == 1, said
    assert "1 worker and 1 worker resumed after update 2 part in update 3" in said
    assert "'last.weight'" in said
    assert "it shows after a resume only" in said
    assert verify("--no-resume", *words)[0] == 0


@pytest.mark.slow
def test_what_shows_after_a_kill_only(verify: Verify) -> None:
    words = (
        "--updates",
        "5",
        "--workers",
        "1,2",
        "--no-towers",
        "--no-resume",
        str(SCRIPT),
        "late",
    )
    code, said = verify(*words)
    assert code == 1, said
    assert "1 worker and 2 workers with one killed part in update 3" in said
    assert "module 'noise' (Noise) was given the same, and returned something else" in said
    assert "it shows after a worker was killed only" in said
    assert verify("--no-kill", *words)[0] == 0


# --- classes of faults ----------------------------------------------------------------------------

FEW = ("--no-towers", "--no-resume", "--no-kill")
ON_RESUME = ("--no-towers", "--no-kill")
ON_TOWERS = ("--no-resume", "--no-kill")
ON_KILL = ("--no-towers", "--no-resume")

# What breaks the promise: the script and its argument, and what has to be named.
FOUND: dict[str, tuple[Path, tuple[str, ...], tuple[str, ...]]] = {
    "own_generator_in_model": (
        STRANGER,
        FEW,
        (
            "aten.randn.generator drew from a generator that the script made",
            "generator=self.generator)",
        ),
    ),
    "dataset_with_own_generator": (STRANGER, FEW, ("row 0 of the dataset has other content",)),
    "given": (SCRIPT, FEW, ("of the dataset had other content the second time", "remembers what")),
    "global_counter_in_loss": (STRANGER, FEW, ("because 'counter' in the closure of the loss",)),
    "own_numpy_generator_in_loss": (STRANGER, FEW, ("* float(generator.uniform(",)),
    "counter_attribute": (STRANGER, FEW, ("because calls (Counting, state.py:",)),
    "buffer_made_in_forward": (STRANGER, FEW, ("self.mean.lerp_(",)),
    "extra_state": (STRANGER, FEW, ("because get_extra_state() (Extra)",)),
    "cached_by_first_batch": (STRANGER, FEW, ("return self.net(x - self.mean)",)),
    "attribute": (
        SCRIPT.with_name("unsaved.py"),
        ON_RESUME,
        ("the optimizer, or a callback after it", "'factor'"),
    ),
    "optimizer": (SCRIPT.with_name("unsaved.py"), ON_RESUME, ("Warming.clock",)),
    "rate": (SCRIPT.with_name("unsaved.py"), ON_RESUME, ("lr of ", "was 0.1 and is 0.05")),
    "rows": (SCRIPT.with_name("unsaved.py"), ON_RESUME, ("has different values", "row ")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_what_breaks_the_promise_is_named(name: str, verify: Verify) -> None:
    script, ways, named = FOUND[name]
    code, said = verify("--workers", "1,2", "--updates", "3", *ways, str(script), "--", name)
    assert code == 1, said
    for words in named:
        assert words in said, said


# What breaks it elsewhere, and is carried here, in the ways in which it would show; and what only
# looks as if it did.
SOUND: dict[str, tuple[str, ...]] = {
    "renorm_data_in_forward": ON_RESUME,
    "embedding_max_norm": ON_KILL,
    "clamp_by_data_assignment": ON_RESUME,
    "teacher_by_data_in_callback": ON_KILL,
    "counter_in_group": ON_RESUME,
    "lookahead_in_attributes": ON_RESUME,
    "penalty_over_the_global_model": ON_TOWERS,
    "default_generator_named": ON_TOWERS,
    "default_dtype_in_forward": ON_TOWERS,
    "two_threads_and_index_put": (*FEW, "--threads", "2"),
    "experts_sgd_momentum_decay": ON_RESUME,
    "non_persistent_statistic": ON_RESUME,
    "vae": ON_TOWERS,
    "diffusion": FEW,
    "gumbel_vq": FEW,
    "dropout": FEW,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_nobody_is_accused_where_the_promise_is_kept(name: str, verify: Verify) -> None:
    words = ("--workers", "1,2", "--updates", "3", *SOUND[name], str(STRANGER), "--", name)
    code, said = verify(*words)
    assert code == 0, said
    assert "same bits on 1 worker, 2 workers" in said or "same bits on 1 worker and 2" in said
    if name == "penalty_over_the_global_model":
        assert "note: it cannot be run on towers" in said
        assert "'net.parameters' in loss (copies.py:25)" in said


# --- thirty of each -------------------------------------------------------------------------------

# Further ones of each kind, on one and on two workers: with those above more than thirty.
ALSO_FOUND = (
    *("history_list", "running_scale_dict", "plain_tensor_attribute", "closure_list_in_loss"),
    *("clock_in_loss", "dataset_that_counts", "anchored_at_the_start", "born_again_teacher"),
    *("function_attribute_warms_up", "weights_cached_by_lru", "keeps_the_norm_it_began_with"),
    *("running_maximum", "teacher_follows_every_fourth_step", "dataset_that_counts_its_reads"),
    *("dataset_with_a_clock", "dataset_with_a_generator_of_its_own", "global_dict_annealed"),
    *("dataset_that_mixes_with_the_last_row", "collate_with_a_running_mean"),
    "dataset_that_writes_its_rows",
)
ALSO_SOUND = (
    *("gan", "ddpm", "bert_like", "gpt2_like", "plain_mlp", "cnn_batchnorm", "lstm", "gru"),
    *("transformer", "rotary_cache", "tied_weights", "new_weight_norm", "orthogonal"),
    *("gradient_penalty", "checkpointed", "vmapped_per_sample", "lora_frozen_base"),
    *("clipped_and_scheduled", "double_precision", "python_random_jitter", "dict_batches"),
    "dataset_that_remembers_rows",
)


def test_there_are_thirty_of_each() -> None:
    cases = catalogue()
    assert len({*FOUND, *ALSO_FOUND}) >= 30
    assert len({*SOUND, *ALSO_SOUND}) >= 30
    assert cases.keys() >= {*ALSO_FOUND, *SOUND, *ALSO_SOUND}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALSO_FOUND[::EVERY])
def test_also_found(name: str, verify: Verify) -> None:
    words = ("--workers", "1,2", "--updates", "6", *FEW, str(STRANGER), "--", name)
    code, said = verify(*words)
    assert code == 1, said
    if name != "global_dict_annealed":  # the shard that differs is named, and not the dict
        assert catalogue()[name].names in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ALSO_SOUND[::EVERY])
def test_also_sound(name: str, verify: Verify) -> None:
    words = ("--workers", "1,2", "--updates", "3", *FEW, str(STRANGER), "--", name)
    code, said = verify(*words)
    assert code == 0, said


# With nothing compiled before, and then from the compiler's cache.
COMPILED = ("vae", "gpt2_like", "bert_like", "gan", "ddpm", "diffusion")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED[::EVERY])
def test_also_sound_when_it_is_compiled(
    name: str, verify: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    words = ("--compile", "--workers", "1,2", "--updates", "3", *FEW, str(STRANGER), "--", name)
    for _ in range(2):
        code, said = verify(*words)
        assert code == 0, said
    assert any((tmp_path / "compiled").iterdir())
