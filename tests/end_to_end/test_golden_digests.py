"""Golden digests: runs give the bits of commit 1ed5e4f, on processors of any kind."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.scenarios import Here
from support.trainings import golden
from support.trainings.configuration import Configuration, parse
from support.trainings.trees import NoBaseError, base_tree

pytestmark = pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="workers are forked, which needs /proc"
)

RUNS = golden.configurations()
SAMPLE, REST = RUNS[:3], RUNS[3:]
PARTS = 4


def expected_results(runs: Sequence[Configuration]) -> dict[str, golden.Result]:
    """Return the results of this kind of processor, from its file or else of the base commit.

    If the history lacks the base commit (an archive of the source, a shallow clone), the digests
    come from the same trainings on one worker.
    """
    found = golden.recorded(golden.file_of(golden.processor()))
    if found is None:
        with ExitStack() as stack:
            try:
                tree = stack.enter_context(base_tree())
            except NoBaseError:
                return golden.undisturbed(Here(), runs)
            return golden.results(tree, runs)
    lacking = [str(run) for run in runs if str(run) not in found]
    assert not lacking, f"run tests/compare_with_base.py --record: it has not recorded {lacking}"
    return found


def require_golden(runs: Sequence[Configuration]) -> None:
    expected = expected_results(runs)
    found = golden.results(Here(), runs)
    reasons = golden.changed()
    wrong = golden.unequal(expected, {run: r for run, r in found.items() if run not in reasons})
    assert not wrong, "\n".join(wrong)
    for run in reasons.keys() & found.keys():
        assert golden.unequal(expected, {run: found[run]}), f"take it out of changed.json: {run}"


def test_a_sample_has_golden_digests() -> None:
    require_golden(SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_others_have_golden_digests(part: int) -> None:
    require_golden(REST[part::PARTS])


def test_a_history_without_the_base_commit_fails_with_what_to_fetch() -> None:
    absent = "0" * 39 + "1"
    with pytest.raises(NoBaseError, match=f"git fetch origin {absent}"), base_tree(absent):
        pass


def test_every_golden_run_is_listed_once_and_read_again_from_its_line() -> None:
    lines = [str(run) for run in RUNS]
    assert len(lines) >= 60
    assert len(set(lines)) == len(lines)
    assert [parse(line) for line in lines] == RUNS
    assert golden.changed().keys() <= set(lines)
    for file in golden.FOLDER.glob("*-torch-*.json"):
        kind = json.loads(file.read_text())["processor"]
        assert golden.file_of(kind) == file
