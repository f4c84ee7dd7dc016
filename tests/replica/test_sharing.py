"""What towers share: copies that are none, draws that come late, switches that a process has once.

Each case is a model and a loss function of ``tests/scripts/sharing.py``. On any engine and number
of workers it has one digest, and the values of a plain loop; or it is refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.runs import Ended, command, last_json, run_all

# Copies that would hold on to the original: what is named where towers are asked for.
NO_COPY = {
    "l2_of_a_global": "'net.parameters' in the loss function (sharing.py:",
    "l1_by_a_function": "in penalty (sharing.py:",
    "loss_that_is_an_object": "the loss function.model is the model that is trained",
    "loss_that_is_a_partial": "argument 'other' of a partial is the model that is trained",
    "lambda_in_an_attribute": "'model.first' in the model.gate (sharing.py:",
    "patched_forward": "'plain' in forward (sharing.py:",
    "hook_with_the_model": "a hook of the model.first",
    "weak_reference": "a weak reference, is the model that is trained",
    "hook_that_keeps_in_the_model": "is written to, of which a tower has a copy",
}
# What towers can do, at most with a line that says how.
SAME = {
    "method_bound_anew": "",
    "partial_of_a_method": "",
    "weight_norm": "",
    "pruned": "",
    "kept_from_before": "",
    "scripted": "",
    "traced": "",
    "hook_that_keeps_in_a_global": "'acts' in keep",
    "counter_in_a_global": "'count' in loss",
    "default_dtype": "torch.set_default_dtype (sharing.py:",
    "default_dtype_that_stays": "the default dtype",
    "attention_kernel": "sdpa_kernel (sharing.py:",
    "onednn_off": "torch.backends.mkldnn.flags (sharing.py:",
    "gradients_left_off": "",
}
DRAWS = ("late_python", "late_numpy", "default_generator", "thread_pool")

ENGINES = {
    "default": ("--workers", "1"),
    "2 processes": ("--workers", "2", "--engine", "processes"),
    "tower": ("--workers", "1", "--engine", "towers"),
    "2 towers": ("--workers", "2", "--engine", "towers"),
    "3 towers": ("--workers", "3", "--engine", "towers"),
}


def ended(case: str, *engines: str) -> dict[str, Ended]:
    words = {name: command("sharing.py", case, options=ENGINES[name]) for name in engines}
    return run_all(words)


def results(case: str, *engines: str) -> dict[str, Any]:
    found = ended(case, *engines)
    assert {e.code for e in found.values()} == {0}, [e.said for e in found.values()]
    return {name: last_json(e.out) for name, e in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", NO_COPY)
def test_a_copy_that_is_none_is_refused_by_name_or_not_needed(case: str) -> None:
    towers = ended(case, "tower", "2 towers")
    assert {e.code for e in towers.values()} == {2}
    for e in towers.values():
        assert NO_COPY[case] in e.said
        assert "use engine='processes'" in e.said
        assert len(e.said.splitlines()) == 1
    found = results(case, "default", "2 processes")
    assert len({r["digest"] for r in found.values()}) == 1
    assert all(r["off"] < 1e-6 for r in found.values())
    why = [line for line in found["default"]["said"] if "workers are processes" in line]
    assert len(why) == 1
    assert NO_COPY[case] in why[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", SAME)
def test_towers_are_right_where_a_copy_is(case: str) -> None:
    found = results(case, "2 processes", "tower", "3 towers")
    assert len({r["digest"] for r in found.values()}) == 1
    assert all(r["off"] < 1e-6 for r in found.values()), {n: r["off"] for n, r in found.items()}
    if SAME[case]:
        assert SAME[case] in " ".join(found["3 towers"]["said"])
        assert "workers compute in turn" in " ".join(found["3 towers"]["said"])
    assert not any("workers are processes" in line for r in found.values() for line in r["said"])


@pytest.mark.slow
@pytest.mark.parametrize("case", DRAWS)
def test_late_draws_are_keyed(case: str) -> None:
    found = results(case, "2 processes", "tower", "2 towers", "3 towers")
    assert len({r["digest"] for r in found.values()}) == 1
    assert all(r["off"] > 1e-6 for r in found.values())  # a plain loop draws other numbers
