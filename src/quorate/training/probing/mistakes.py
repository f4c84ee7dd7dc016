"""Mistakes without an error: the run ends with exit code 0, and the model has not learned.

Four mistakes are looked for before there are workers: a loss scaled by a GradScaler, a loss summed
over its rows, a tensor with a gradient outside of the model, and parameters of the model without an
optimizer. The first shard is computed a few times more, without a backward pass. Afterwards the
model, the generators and the state of the user's code are as before.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch.optim import Optimizer

from quorate.data.source import Source
from quorate.errors import LossError
from quorate.machine.memory_fraction import free_cache
from quorate.machine.text import abridged_names
from quorate.replica.model import trainable, unchanged
from quorate.replica.shared.references import found
from quorate.replica.witness.history import forget_cached
from quorate.replica.witness.scaled_loss import ScaledLoss
from quorate.training.probing.loss_trial import LossTrial
from quorate.training.probing.summed_loss import Summed
from quorate.training.state import State
from quorate.training.worker_group import WorkerGroup


def look_for_mistakes(workers: WorkerGroup, state: State, source: Source) -> None:
    """Look for mistakes that raise no error, and note them as questions about the values.

    Args:
        state: the state at the beginning of training.

    Raises:
        LossError: the loss is scaled by a ``GradScaler``.
    """
    notes = workers.replicas.notes
    if (line := _without_optimizer(state)) is not None:
        notes.question_values(line)
    if any(isinstance(module, torch.jit.ScriptModule) for module in state.model.modules()):
        return  # TorchScript specialises its kernels on the first shapes
    scaled: ScaledLoss | None = None
    contents = workers.replicas.contents()
    try:
        with unchanged(state.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # caused by few rows; training shows its own warnings
            trial = LossTrial(workers.probe_replica(state), state.parameters, source)
            scaled = trial.scaled()
            if scaled is None:
                outside = trial.outside_leaves(state.model)
                if outside:
                    notes.question_values(_outside_text(workers, state, outside))
                summed = trial.summed() if _depends_on_shards(workers) else None
                if summed is not None:
                    notes.question_values(_sum_text(summed))
    except Exception:  # user code that fails with other rows: training goes on
        pass
    finally:
        forget_cached(state.model)
        contents.restore()
        if workers.has_processes:
            free_cache(workers.devices)
    if scaled is not None:
        raise LossError(
            f"the loss is multiplied by {scaled.scale:,g}, as a GradScaler scales it "
            f"({scaled.line})",
            fix="return the loss as it is, and pass precision='fp16' (or 'bf16'), which scales "
            "the loss and unscales its gradients",
        )


def _depends_on_shards(workers: WorkerGroup) -> bool:
    """Return whether a loss that is a sum would change with the number of shards.

    ``Gather`` computes the loss of the whole batch, and ``shards=1`` is a choice.
    """
    return workers.config.gather is None and workers.config.shards != 1


# --- parameters that no optimizer has -------------------------------------------------------------


def _without_optimizer(state: State) -> str | None:
    optimizers = state.phases.optimizers
    trained = {name for each in optimizers for group in each.groups for name in group}
    # An optimizer made of others may list the parameters of some of them only.
    others = {
        id(parameter)
        for each in optimizers
        for inner in _optimizers_within(each.user_optimizer)
        for group in inner.param_groups
        for parameter in group["params"]
    }
    parameters = trainable(state.model)
    left = [n for n, p in parameters.items() if n not in trained and id(p) not in others]
    if not left:
        return None
    elements = sum(parameters[name].numel() for name in left)
    return (
        f"no optimizer has {len(left)} of the model's {len(parameters)} trainable parameters "
        f"({elements:,} elements), so training never changes {abridged_names([*map(repr, left)])}; "
        "give the optimizer all parameters that its function receives, or call "
        "requires_grad_(False) on the others"
    )


def _optimizers_within(optimizer: Optimizer) -> Iterator[Optimizer]:
    for value in vars(optimizer).values():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, Optimizer) and each is not optimizer:
                yield each


# --- tensors outside of the model -----------------------------------------------------------------


def _outside_text(workers: WorkerGroup, state: State, outside: Sequence[torch.Tensor]) -> str:
    names = {id(t): f"tensor {number}" for number, t in enumerate(outside)}
    roots = {"the loss function": workers.config.loss}
    ways: dict[int, str] = {}
    for line in found({"the model": state.model}, roots, names).originals:
        way, _, number = line.rpartition(" is tensor ")
        ways.setdefault(int(number), way)
    texts = [
        f"{ways.get(number, 'a tensor')} of shape {tuple(tensor.shape)}"
        for number, tensor in enumerate(outside)
    ]
    are, them = ("a tensor", "it") if len(texts) == 1 else (f"{len(texts)} tensors", "them")
    return (
        f"the loss depends on {are} outside the model with requires_grad=True, and no optimizer "
        f"trains {them}: {abridged_names(texts)}; make {them} part of the model (a "
        "torch.nn.Parameter or a module), or call requires_grad_(False)"
    )


# --- a loss that is a sum -------------------------------------------------------------------------


def _sum_text(summed: Summed) -> str:
    whole, share = summed.whole, summed.share
    of = f"{summed.of} is" if share > 0.95 else f"{share:.0%} of {summed.of} is"
    calls = f" ({summed.calls})" if summed.calls else ""
    return (
        f"{of} a sum over the rows of a shard{calls}: {whole:.6g} for {summed.rows} rows, "
        f"{summed.halves[0]:.6g} and {summed.halves[1]:.6g} for the two halves; the gradient of a "
        "step is the mean over shards, so it depends on shards=; return the mean over the rows, or "
        '{"loss": sum / n, "weight": n} with n rows, tokens or pixels'
    )
