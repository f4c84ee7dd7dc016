"""Predictions: jobs that yield what a function returns for the rows of each shard."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from quorate.coordination.keys import key
from quorate.data.source import Batch, Source
from quorate.engines.job import Job, Task
from quorate.errors import OutputError, UserError
from quorate.replica.flat import Flat
from quorate.replica.outputs.rows import Piece, checked
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream

Function = Callable[[torch.nn.Module, Any], Any]  # from model and batch to outputs by row
DEFAULT, OWN = "", "own"  # in the place of a name: the model; what this process was called with

# In a worker process that a prediction was the first loop of: the function of the script there.
_own: Function | None = None


def note_own(function: Function | None) -> None:
    """Note what this process is about to serve: the script has called ``predict`` with it."""
    global _own
    _own = function


def name_of(function: Function | None) -> str | None:
    """Return the name by which worker processes find a function; None if they cannot."""
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
    """Return the function of a name, in this process.

    Raises:
        AttributeError, ImportError: there is none.
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
    """Call the model with what a batch holds of inputs.

    A dict is its keyword arguments. Of a list or tuple it is the first part, if the model takes no
    more: the rest are labels.

    Raises:
        OutputError: nobody can tell which parts are inputs.
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


class Prediction(Job):
    """What a function returns for the rows of each shard, in evaluation mode.

    Args:
        function: or the name of it.
        called: its name, for worker processes.
    """

    name = "prediction"
    has_own_steps = True

    def __init__(
        self,
        source: Source,
        parameters: Flat,
        steps: range,
        *,
        function: Function | str,
        called: str = DEFAULT,
        loader_workers: int = 0,
        threads: int = 1,
    ) -> None:
        super().__init__(source, parameters, steps, loader_workers=loader_workers, threads=threads)
        self._called = called
        if isinstance(function, str):
            try:
                function = named(function)
            except (AttributeError, ImportError) as error:
                raise UserError(
                    "predict",
                    f"a worker does not find the function {function!r}: {error}",
                    fix="define it in the script before the loop",
                ) from error
        self._function = function

    def options(self) -> dict[str, Any]:
        """Return what a worker process needs to make the same job."""
        return {**self.loading, "function": self._called}

    def home_shards(self, rank_of: tuple[int, int], step: int) -> range:
        """Return the one shard of every N-th step, and none of the others."""
        rank, workers = rank_of
        return range(1) if step % workers == rank else range(0)

    def version(self, task: Task) -> object:  # noqa: ARG002
        """Return the same for all steps: nothing is updated meanwhile."""
        return self

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        task.at("forward")
        rows, function = len(batch.rows), self._function
        returned: list[Any] = []

        def keep(model: torch.nn.Module, data: Any, *_at: Any) -> dict[str, Any]:
            # Whoever tries a shard twice wants the last.
            returned[:] = [checked(function(model, data), rows, "what predict's function returned")]
            return {"loss": torch.zeros(())}

        seed = key("prediction", self.plan.seed, task.step, task.shard)
        with replica.watched(lambda _: keep, eager=False):
            total = replica.evaluation(
                batch.data, rows, stream, seed, reload=lambda: self._reloaded(task)
            )
        total.outputs = [Piece(task.step, task.shard, returned[0])]
        return total
