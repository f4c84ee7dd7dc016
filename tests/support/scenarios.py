"""Scenarios: runs of ``support/trainings`` with faults, and the required outcomes.

    Scenario("model=mlp engine=processes:2 fault=kill@forward", says=["another is starting"])

A function runs and checks all scenarios, on every engine: each fault happened, the exit codes, the
printed words, the bits of the same training on one undisturbed worker, or each row in the books as
often as required by the rule, and no process, shared memory or temporary file is left.
"""

import io
import os
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from support.books import a_quorum_was_there_each_time, each_row_was_there_once_an_epoch
from support.references import References
from support.runs import LIMIT_S, Ended, processes_of
from support.trainings.configuration import parse
from support.trainings.datasets import BATCH, make_data
from support.trainings.faults import faults_of
from support.trainings.runner import Outcome, differences, run_configuration
from support.warm import WARM

from quorate.__main__ import main

LEFT_S = 60.0  # for the processes of a run whose main process has ended, on a busy machine


class Scenario(NamedTuple):
    """A run, and the required outcome."""

    line: str  # a configuration
    codes: Sequence[int] = (0,)  # exit codes of the parts
    says: Sequence[str] = ()  # printed words
    hides: Sequence[str] = ()  # words never printed
    tracebacks: int = 0
    saved: int | None = None  # updates, of an unfinished run
    median_s: float = LIMIT_S  # most seconds from an update to the next
    end_s: float = LIMIT_S  # from the last update to the end of ``fit``

    def __str__(self) -> str:
        return self.line


def _segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "quorate" in path.name}


class Here:
    """This tree, in forks of the tests' warm process.

    Args:
        device: the substitute for each CPU in the options.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def run(self, arguments: Sequence[str]) -> Ended:
        """Run the command ``quorate`` to its end. Blocks."""
        if arguments[0] == "inspect":  # only reads: a fork would take a second
            with redirect_stdout(io.StringIO()) as shown:
                return Ended(main([*arguments]), shown.getvalue(), "", [])
        mark, before = f"QUORATE_TEST={uuid.uuid4().hex}", _segments()
        with tempfile.TemporaryDirectory(prefix="q-", ignore_cleanup_errors=True) as temporary:
            env = {**os.environ, "TMPDIR": temporary}
            words = [self._on_device(word) for word in arguments]
            try:
                code, out, err = WARM.run(words, env, LIMIT_S, mark=mark)
            except subprocess.TimeoutExpired as late:
                return Ended(None, "", "\n".join(late.__notes__), [])
            until, segments = time.monotonic() + LEFT_S, _segments() - before
            # Segments may be those of another run at the same time.
            while (left := processes_of(mark)) or (segments := segments & _segments()):
                if time.monotonic() > until:
                    break
                time.sleep(0.02)
            # Files made by importing torch.
            files = {p.name for p in Path(temporary).iterdir() if "torchinductor_" not in p.name}
        return Ended(code, out, err, [*left.values(), *segments, *files])

    def _on_device(self, word: str) -> str:
        return word.replace("cpu", self.device) if word.startswith("cpu") else word


def check(scenario: Scenario, references: References, here: Here | None = None) -> Outcome:
    """Run a scenario; fail at any difference from the required outcome."""
    configuration, here = parse(scenario.line), here or Here()
    found = run_configuration(here, configuration)
    printed = "".join(part.out + part.err for part in found.parts)
    left = [each for part in found.parts for each in part.left]
    assert not left, f"{left}\n{printed}"
    assert [*found.codes] == [*scenario.codes], printed
    faults = [fault for part in faults_of(configuration.fault) for fault in part]
    assert {fault.mark(Path()).name for fault in faults} == found.happened, printed
    for words in scenario.says:
        assert words in printed, printed
    for words in scenario.hides:
        assert words not in printed, printed
    assert printed.count("Traceback") == scenario.tracebacks, printed
    step = found.facts.get("global_step")
    if scenario.codes[-1] != 0:
        assert step == scenario.saved, printed
        return found
    assert step == configuration.steps, printed
    lines = [dict(line) for line in found.log if "weight" in line]
    assert [line["global_step"] for line in lines] == [*range(1, step + 1)]
    times = [line["at"] for line in lines]
    assert median(after - before for before, after in pairwise(times)) < scenario.median_s, printed
    ended_at = float(printed.rpartition("to the end ")[2].split()[0])
    assert ended_at - times[-1] < scenario.end_s, printed
    rows = len(make_data(configuration.data, "vectors", Path()).dataset)
    per_epoch = -(-rows // BATCH)
    if configuration.rule == "sync" or configuration.engine.endswith(":1"):
        expected = references.once(
            lambda: _result(run_configuration(here, configuration.undisturbed)),
            *("scenario", here.device, str(configuration.undisturbed)),
        )
        wrong = differences(Outcome(*expected), Outcome(*_result(found)))
        assert not wrong, f"{wrong}\n{printed}"
    elif configuration.rule.startswith("quorum"):
        a_quorum_was_there_each_time(lines, step // per_epoch, int(configuration.rule[-1]), rows)
    else:
        bound = float(configuration.rule.partition(":")[2] or "inf")
        epochs = step // (per_epoch * configuration.shards)
        each_row_was_there_once_an_epoch(lines, epochs, bound, rows)
    return found


def _result(outcome: Outcome) -> list[Any]:
    """Return the facts unchanged by engines and faults, in the order of ``Outcome``."""
    metrics = [line for line in outcome.metrics if {"weight", "validation"} & line.keys()]
    return [[*outcome.codes[-1:]], outcome.facts, metrics, outcome.said]
