"""Traces of runs: under each engine, of good runs and of failures; and the bounds of traces."""

import json
from pathlib import Path

import pytest
from support import traces
from support.digests import digest_of
from support.runs import command, run
from support.small import DATA, trainer

from quorate.engines.tracing import Span, Trace, batch, moved
from quorate.services.tracing.chrome import as_json

# Two epochs of five updates, of four shards; and after each an evaluation of five steps.
SHARDS = {(step, shard) for step in range(10) for shard in range(4)}


SCRIPT = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.small import DATA, trainer
if __name__ == "__main__":
    trainer(Path(sys.argv[1])).fit(DATA, epochs=2, validation=DATA)
"""


def require_all(written: traces.Written) -> None:
    """Check that the trace has all actions of two epochs."""
    for name in ("forward", "backward"):
        assert written.shards("training", name) == SHARDS
        for process, thread in written.names:
            own = [
                (span.step, span.shard)
                for span in written.of("training", name)
                if (span.process, span.thread) == (process, thread)
            ]
            assert len(own) == len(set(own))  # a copy is another worker's
    evaluated = {shard for _, shard in written.shards("evaluation", "forward")}
    assert evaluated == {0, 1, 2, 3}
    whole = {name: written.of("coordinator", name) for name in ("update", "evaluation")}
    own = min(span.process for span in whole["evaluation"])
    assert [s.step for s in whole["update"] if s.process == own] == [*range(10)]
    assert [span.step for span in whole["evaluation"]] == [5, 10]
    assert written.of("coordinator", "writing a checkpoint")
    # Evaluated shards are within the evaluation.
    for span in written.of("evaluation", "forward"):
        assert any(e.begin <= span.begin and span.end <= e.end for e in whole["evaluation"])
    # A shard is computed from the result of the update before.
    updates = {span.step: span for span in whole["update"] if span.process == own}
    for span in written.of("training", "forward"):
        assert span.step == 0 or updates[span.step - 1].end <= span.begin + traces.ROUNDED
    assert len(written.counters["loss"]) == 10


@pytest.mark.parametrize("workers", [1, 2])
def test_of_a_run_in_this_process(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    run = trainer(tmp_path / "run", workers, trace=file)
    run.fit(DATA, epochs=2, validation=DATA)
    written = traces.read(file)
    require_all(written)
    expected = {"coordinator", *(f"worker {n}" for n in range(workers))}
    assert set(written.names.values()) == expected
    assert f"trace: {len(written.spans):,} spans in {file}" in capsys.readouterr().out
    plain = trainer(None, workers)
    plain.fit(DATA, epochs=2, validation=DATA)
    assert digest_of(run) == digest_of(plain)


@pytest.mark.parametrize("engine", ["processes", "collective"])
def test_of_processes(engine: str, tmp_path: Path) -> None:
    file, script = tmp_path / "trace.json", tmp_path / "traced.py"
    script.write_text(SCRIPT)
    options = ("--engine", engine, "--workers", "2", "--trace", str(file))
    ended = run(command(script, str(tmp_path / "run"), options=options))
    assert ended.code == 0, ended.said
    written = traces.read(file)
    require_all(written)
    # Each worker has told of itself: the phases of training are of two processes.
    assert len({span.process for span in written.of("training", "forward")}) == 2


@pytest.mark.parametrize(("asked", "steps"), [(":3", {0, 1, 2}), ("3:", {3, 4})])
def test_some_steps_alone(asked: str, steps: set[int], tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    trainer(None, 2, trace=file, trace_steps=asked).fit(DATA, validation=DATA)
    written = traces.read(file)
    assert written.shards("training", "forward") == {s for s in SHARDS if s[0] in steps}
    assert {span.step for span in written.of("coordinator", "update")} == steps
    has_evaluation = asked == "3:"  # after update 5
    assert bool(written.of("coordinator", "evaluation")) == has_evaluation
    assert bool(written.of("evaluation", "forward")) == has_evaluation


# --- parts of a trace: spans of another host, and a bound -----------------------------------------


def test_spans_of_another_host_are_moved_by_its_wall_clock() -> None:
    spans = [Span("forward", "training", 1, 2, 10.0, 11.5)]
    sent = json.loads(json.dumps(batch(spans)))
    here = Trace()
    here.take_batch(3, sent)
    (lane, span), *_ = here.spans
    assert (lane.worker, span) == (3, spans[0])  # the same clock
    (far,) = moved({**sent, "host": "another", "clock": sent["clock"] + 100}, sent["host"])
    assert far.begin == pytest.approx(110, abs=1)
    assert far.end - far.begin == pytest.approx(1.5)


def test_a_trace_has_a_bound(tmp_path: Path) -> None:
    trace = Trace(most=3)
    spans = [Span("forward", "training", n, 0, float(n), n + 0.5) for n in range(5)]
    trace.put(0, spans[:2])
    trace.put(1, [span._replace(track="stage 1") for span in spans[2:]])
    assert (len(trace.spans), trace.left_out) == (3, 2)
    file = tmp_path / "trace.json"
    file.write_bytes(b"".join(as_json(trace)))
    written = traces.read(file)
    assert sorted(written.names.values()) == ["worker 0", "worker 1: stage 1"]
    assert json.loads(file.read_text())["otherData"] == {"leftOut": 2}
