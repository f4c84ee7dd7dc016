"""Trainings as strangers write them: the same bits and the right values, or a stated reason."""

import os

import pytest
from support.strangers import is_right, judged, judged_here, makers

CASES = makers()
# In all ways: a case of each kind of habit; all cases with QUORATE_TEST_STRANGERS=all.
CHOSEN = {
    "compiled_layers": "torch.compile",
    "counter_attribute": "state of the model",
    "dataset_remembers_a_shard": "state of the dataset",
    "hook_holds_another_layer": "a model that towers cannot copy",
    "late_numpy_hidden": "draws that cannot be foreseen",
    "lists_in_state": "an optimizer of one's own",
    "renorm_data_in_forward": "forward writes parameters",
    "teacher_by_data_in_callback": "a callback writes parameters",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(CASES))
def test_nothing_is_silent_on_towers(name: str) -> None:
    case, verdict = CASES[name](), judged_here(name)
    assert is_right(case, verdict), f"{verdict.kind}: {verdict.why}\n{verdict.notices}"
    assert case.says in verdict.notices, verdict.notices


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", sorted(CASES if "QUORATE_TEST_STRANGERS" in os.environ else CHOSEN)
)
def test_nothing_is_silent(name: str) -> None:
    verdict = judged(name)
    assert is_right(CASES[name](), verdict), f"{verdict.kind}: {verdict.why}"
