"""Predictions: jobs with the outputs of a function for the rows of each shard."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quorate.data.source import Batch
from quorate.engines.job import Evaluation, Task
from quorate.errors import OutputError, UserError
from quorate.replica.outputs.rows import Piece, checked
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream

Function = Callable[[torch.nn.Module, Any], Any]  # from model and batch to outputs by row
DEFAULT, OWN = "", "own"  # names of ``model_of``, and of the function noted by ``note_own``

_own: Function | None = None


def note_own(function: Function | None) -> None:
    """Note the argument of ``predict``. In a worker process the script calls ``predict``, too."""
    global _own
    _own = function


def name_of(function: Function | None) -> str | None:
    """Return a name for ``named`` in all processes; None for a function without such a name."""
    if function is None:
        return DEFAULT
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or name is None:
        return None
    text = f"{module}:{name}"
    try:
        return text if named(text) is function else None
    except (AttributeError, ImportError):
        return None


def named(text: str) -> Function:
    """Return the function with a name, in this process.

    Raises:
        AttributeError, ImportError: no function has the name.
    """
    if text == DEFAULT:
        return model_of
    if text == OWN:
        return _own or model_of
    module, _, path = text.partition(":")
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for attribute in path.split("."):
        found = getattr(found, attribute)
    function: Function = found
    return function


def model_of(model: torch.nn.Module, batch: Any) -> Any:
    """Call the model with the inputs of a batch.

    A dict contains keyword arguments. The input in a list or tuple is the first part, if the model
    has a single positional argument: further parts are labels.

    Raises:
        OutputError: the model has several arguments.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    if not isinstance(batch, list | tuple):
        return model(batch)
    if len(batch) > 1:
        taken = inspect.signature(model.forward).parameters.values()
        positional = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) != 1 or any(p.kind is p.VAR_POSITIONAL for p in taken):
            raise OutputError(
                "predict",
                f"a batch has {len(batch)} parts, and {type(model).__name__}.forward may take "
                "several",
                fix="pass a function(model, batch) that calls it",
            )
    return model(batch[0])


@dataclass(eq=False, kw_only=True)
class PredictionJob(Evaluation):
    """The outputs of a function for the rows of each shard, in evaluation mode.

    Args:
        function: the name of the function: see ``named``.
    """

    name = "prediction"
    sent = (*Evaluation.sent, "function")

    function: str

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self._function = named(self.function)
        except (AttributeError, ImportError) as error:
            raise UserError(
                "predict",
                f"a worker does not find the function {self.function!r}: {error}",
                fix="define it in the script before the loop",
            ) from error

    def home_shards(self, rank_of: tuple[int, int], step: int) -> range:
        """Return the only shard of every N-th step, and no shards of further steps."""
        rank, workers = rank_of
        return range(1) if step % workers == rank else range(0)

    def version(self, task: Task) -> object:  # noqa: ARG002
        """Return a version for all steps: parameters are constant during a prediction."""
        return self

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        rows, function = len(batch.rows), self._function
        returned: list[Any] = []

        def keep(model: torch.nn.Module, data: Any, *_at: Any) -> dict[str, Any]:
            # If a shard is computed twice, the last outputs count.
            returned[:] = [checked(function(model, data), rows, "what predict's function returned")]
            return {"loss": torch.zeros(())}

        with replica.watched(lambda _: keep, eager=False):
            total = super()._work(replica, batch, stream, task)
        total.outputs = [Piece(task.step, task.shard, returned[0])]
        return total
