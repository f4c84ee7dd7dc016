"""Traces of runs: under each engine, of what went well and of what did not; and their bounds."""

from __future__ import annotations

import json
from contextvars import Context
from itertools import pairwise
from pathlib import Path

import pytest
from support import traces
from support.digests import digest_of
from support.messages import expect_error
from support.runs import command, digests, run
from support.small import DATA, trainer

import quorate
from quorate.coordination.spans import Span, SpanLog
from quorate.errors import SettingError
from quorate.services.report import Report
from quorate.services.tracing.chrome import as_json
from quorate.transports.processes import records
from quorate.transports.tracing.batch import batch, moved
from quorate.transports.tracing.own_log import own_log
from quorate.transports.tracing.trace import Trace, current, tracing
from quorate.transports.worker_status import OwnTimesheet, Timesheet

# Two epochs of five updates, of four shards; and after each an evaluation of five steps.
SHARDS = {(step, shard) for step in range(10) for shard in range(4)}


def require_all(written: traces.Written) -> None:
    """See that all was noted that is done of ``traced.py``."""
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
    # What is evaluated is evaluated within the evaluation.
    for span in written.of("evaluation", "forward"):
        assert any(e.begin <= span.begin and span.end <= e.end for e in whole["evaluation"])
    # A shard is computed from what the update before has left.
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
    assert current() is None
    plain = trainer(None, workers)
    plain.fit(DATA, epochs=2, validation=DATA)
    assert digest_of(run) == digest_of(plain)
    assert own_log() is None  # also in the thread that was the worker


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "collective"])
def test_of_processes(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    options = ("--engine", engine, "--workers", "2", "--trace", str(file))
    ended = run(command("traced.py", str(tmp_path / "run"), options=options))
    assert ended.code == 0, ended.said
    written = traces.read(file)
    require_all(written)
    # Each worker has told of itself: the phases of training are of two processes.
    assert len({span.process for span in written.of("training", "forward")}) == 2
    plain = run(command("traced.py", str(tmp_path / "plain"), options=options[:4]))
    assert plain.code == 0, plain.said
    assert digests(tmp_path / "run") == digests(tmp_path / "plain")


@pytest.mark.slow
def test_of_a_run_that_fails_on_processes(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    options = ("--engine", "processes", "--workers", "2", "--trace", str(file))
    ended = run(command("traced.py", str(tmp_path / "run"), "raises", options=options))
    assert ended.code == 1
    assert "as it was asked for" in ended.said
    steps = {span.step for span in traces.read(file).of("coordinator", "update")}
    assert steps == {*range(7)}


class Ends(quorate.Callback):
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def updated(self, report: Report) -> None:
        if report.global_step == 3:
            raise self._error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_it_is_written_however_a_run_ends(error: BaseException, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with pytest.raises(type(error)):
        trainer(None, 2, trace=file).fit(DATA, callbacks=[Ends(error)])
    written = traces.read(file)
    assert {span.step for span in written.of("coordinator", "update")} == {0, 1, 2}
    # What the error came out of is in it.
    assert [s.step for s in written.of("coordinator", "between updates")] == [1, 2, 3]


def test_some_steps_alone(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    run = trainer(None, 2, trace=file, trace_steps="2:4")
    run.fit(DATA, validation=DATA)
    written = traces.read(file)
    assert written.shards("training", "forward") == {s for s in SHARDS if s[0] in (2, 3)}
    assert {span.step for span in written.of("coordinator", "update")} == {2, 3}
    assert written.of("coordinator", "evaluation") == []  # after update 5
    assert written.of("evaluation", "forward") == []


def test_a_file_that_cannot_be_written_fails_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    run = trainer(None, 1, trace=folder / "trace.json")

    class Removes(quorate.Callback):
        def updated(self, report: Report) -> None:
            if folder.exists():
                folder.rmdir()

    run.fit(DATA, callbacks=[Removes()])
    assert run.global_step == 5
    assert "the trace was not written: [Errno 2]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings",
    [
        {"trace": "no/such/folder/t.json"},
        {"trace": "."},
        {"trace": 5},
        {"trace": "t.json", "trace_steps": "4"},
        {"trace": "t.json", "trace_steps": "4:4"},
        {"trace": "t.json", "trace_steps": ":"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_what_cannot_be_asked_for(settings: dict[str, object]) -> None:
    name = [*settings][-1]
    with expect_error(SettingError, name=name, got=settings[name]):
        quorate.RunDir(**settings)  # type: ignore[arg-type]


def test_which_steps_are_asked_for() -> None:
    asked = {"7:9": range(7, 9), ":3": range(3)}
    for text, steps in asked.items():
        assert quorate.RunDir(trace="t.json", trace_steps=text).traced_steps == steps
    for open_ended in (quorate.RunDir(), quorate.RunDir(trace_steps="7:")):
        assert 10**15 in open_ended.traced_steps
    assert 6 not in quorate.RunDir(trace_steps="7:").traced_steps


# --- what it is made of ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_a_timesheet_notes_phases_from_end_to_begin(kind: str) -> None:
    sheet: OwnTimesheet | Timesheet
    if kind == "own":
        sheet = OwnTimesheet()
        log = sheet.log = SpanLog()
        log.job = "training"
    else:
        sheet = Timesheet(bytearray(Timesheet.SIZE))
        sheet.tell("starting", 0, 0)
        sheet.record("training")
    told = [("waiting", 0, 0), *((p, 3, 1) for p in ("fetching", "forward", "backward"))]
    for phase in told:
        sheet.tell(*phase)
    if isinstance(sheet, OwnTimesheet):
        spans = log.take()
    else:
        found = sheet.recorded(cuts=True)
        assert found is not None
        spans = found["spans"]
        assert [s.name for s in spans] == ["starting", *(phase for phase, _, _ in told)]
        spans = spans[:-1]
    assert [(s.name, s.step, s.shard) for s in spans] == [("starting", 0, 0), *told[:-1]]
    assert all(a.end == b.begin for a, b in pairwise(spans))


def test_what_was_handed_over_is_not_handed_over_again() -> None:
    sheet = Timesheet(bytearray(Timesheet.SIZE))
    sheet.tell("pushing", 2, 1)
    sheet.record("training")
    first = sheet.recorded(cuts=True)
    sheet.tell("waiting")
    second = sheet.recorded(cuts=False)
    assert first is not None
    assert second is not None
    (pushing,), (answering,) = first["spans"], second["spans"]
    assert (pushing.name, answering.name) == ("pushing", "answering")
    assert pushing.end == answering.begin


def test_a_replica_in_stages_finds_the_log_of_its_worker() -> None:
    Context().run(note_a_stage)  # where no log is left from before


def note_a_stage() -> None:
    sheet = Timesheet(bytearray(Timesheet.SIZE))
    assert own_log() is None
    sheet.record("training", 7, 4)
    log = own_log()
    assert log is not None
    log.stage("forward", stage=1, place=2, begin=1.0, end=2.0)
    found = sheet.recorded(cuts=False)
    assert found is not None
    assert found["spans"] == [Span("forward", "training", 7, 6, 1.0, 2.0, "stage 1")]
    sheet.record(None)
    assert own_log() is None


def test_nothing_is_noted_where_nobody_asks() -> None:
    sheet, own = Timesheet(bytearray(Timesheet.SIZE)), OwnTimesheet()
    sheet.tell("waiting", 0, 0)
    sheet.record(None)
    for phase in ("fetching", "forward"):
        sheet.tell(phase, 0, 0)
        own.tell(phase, 0, 0)
    assert sheet.recorded(cuts=True) is None
    assert own.log is None
    # The answer of a shard is a record, as ever: spans would make JSON of it.
    done = {"kind": "done", "job": 1, "ticket": 2, "weight": 1.0, "metrics": {"loss": 1.0}}
    assert records.packed({**done, "missing": [], "totals": {}}) is not None


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


def test_an_empty_trace_is_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with tracing(Trace()) as trace:
        assert current() is trace
    file.write_bytes(b"".join(as_json(trace)))
    assert traces.read(file).spans == []
