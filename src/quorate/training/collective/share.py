"""Sharing: rank 0 sends the state when a loop begins, and the changes by user code later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quorate.engines.collective.rank_control import RankControl
from quorate.replica.beside.values import SharedValues
from quorate.training.state import State


def described(state: State) -> dict[str, list[Any]]:
    """Return dtype and shape of each tensor of a model."""
    return {name: [_dtype(value), list(value.shape)] for name, value in state.tensors().items()}


def misfit(rank: int, there: dict[str, list[Any]], state: State) -> str:
    """Return how this rank's model differs from rank 0's, in words; an empty text if equal.

    Args:
        there: rank 0's model, as ``described``.
    """
    here = described(state)
    for key in [*here, *(there.keys() - here.keys())]:
        if here.get(key) != there.get(key):
            return (
                f"rank {rank}: {key} of the model is {_in_words(here.get(key))}, and "
                f"{_in_words(there.get(key))} on rank 0; make the script repeatable: every rank "
                "runs it"
            )
    return ""


def send(ranks: RankControl, state: State) -> None:
    """Send the state of rank 0 to all ranks, by calls of ``take`` and ``spread``. Blocks.

    Of entries of the optimizer with a value per element, each rank receives only its own part: see
    ``SpreadOptimizer.send``.
    """
    tensors, kept = state.phases.save(with_spread=False)
    ranks.tell(
        "take",
        {key: [_dtype(value), list(value.shape)] for key, value in tensors.items()},
        {
            **kept,
            "global_step": state.global_step,
            "account": state.account(),
            "amendments": state.model_edits.model_changes.to_json(),
        },
    )
    ranks.spread(value.to(ranks.device) for value in tensors.values())
    ranks.spread(_all_tensors(state))


@torch.no_grad()
def take(
    ranks: RankControl, described: dict[str, list[Any]], record: dict[str, Any], state: State
) -> None:
    """Receive the state of rank 0, and load the state. Blocks."""
    tensors = {
        key: torch.empty(shape, dtype=getattr(torch, dtype), device=ranks.device)
        for key, (dtype, shape) in described.items()
    }
    ranks.spread(tensors.values())
    ranks.spread(_all_tensors(state))
    tensors = {key: value.cpu() for key, value in tensors.items()}
    state.phases.load(state.phases.loadable(tensors, record, Path("rank 0")))
    state.model_edits.load(record["amendments"])
    state.load_account(record["account"])
    state.global_step = record["global_step"]


def _all_tensors(state: State) -> list[torch.Tensor]:
    """Return the tensors of a model: flat vectors, and all tensors outside of flat vectors."""
    views = {view.data_ptr() for view in state.parameters.views.values()}
    named = [*state.tensors().values(), *state.rest().values()]
    rest = [value for value in named if value.numel() and value.data_ptr() not in views]
    return [*state.parameters.vectors, *rest]


def values(state: State) -> list[torch.Tensor]:
    """Return the tensors of a model that user code may have changed, and that ranks have copies of.

    The tensors are parameters and buffers, without parameters shared by all ranks in memory.
    """
    vectors = [] if state.owners.has_one_copy else state.parameters.vectors
    named = [*state.model_edits.frozen().values(), *vectors]
    return [*named, *(buffer for buffer in state.model.buffers() if buffer.numel())]


def news_of_values(state: State, known: SharedValues) -> dict[str, Any] | None:
    """Return the message about the values of ``Shared``; None if all ranks know the values.

    Args:
        known: the values on all ranks.
    """
    values = state.model_edits.model_changes.shared
    is_stored = values.stored != known.stored
    return None if values.number == known.number else values.to_json(stored=is_stored)


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _in_words(tensor: list[Any] | None) -> str:
    return "not there" if tensor is None else f"{tuple(tensor[1])} of {tensor[0]}"
