"""The trace of operators: each call's inputs and outputs as hashes, and the call site."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from quorate.replica import replica as replica_module
from quorate.replica.loss import Loss
from quorate.replica.placement.call_site import CallSites
from quorate.replica.placement.schema import arguments
from quorate.replica.replica import Replica
from quorate.replica.streams import RANDOM_OPERATORS, Stream
from quorate.replica.torch_internals import (
    OperatorMode,
    base_of,
    current_backward_call,
    is_same_generator,
)
from quorate.replica.witness.calls import Call
from quorate.replica.witness.values import extent_text, pieces, tensor_text

# These return uninitialised memory. Two traces fill it with different values.
EMPTY = {
    *("empty", "empty_like", "empty_strided", "empty_permuted"),
    *("new_empty", "new_empty_strided"),
}
# These do not read the arguments that they write.
OVERWRITES = {
    *("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"),
    *(name.partition(".")[0] for name in RANDOM_OPERATORS if "_" in name.partition(".")[0][-1:]),
}


class OperatorTrace(OperatorMode):
    """A context that records each operator called by this thread, including the backward pass.

    Args:
        model: the model whose modules are named.
        stream: the thread's stream; a draw from another generator is recorded as such.
        fill: value for uninitialised memory. With different values in two traces, reads of such
            memory are detected.
    """

    def __init__(self, model: torch.nn.Module, stream: Stream, fill: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.returned: list[str] = []  # by the loss function
        self._stream = stream
        self._fill = fill
        self._is_over = False
        self._call_sites = CallSites(model, until=replica_module.__file__)

    def phase(self, name: str) -> None:
        """Receive the phase of the shard: operators after the backward pass are not recorded."""
        self._is_over = name == "pushing"

    def watch(self, loss: Loss) -> Loss:
        """Return a loss function that first clears the trace: a shard may be begun again.

        The weight of its result is 1: gradients are then passed on as made by autograd.
        """

        def begin(model: torch.nn.Module, batch: Any, *at: Any) -> Any:
            self.calls.clear()
            self._call_sites.clear()
            returned = loss(model, batch, *at)
            self._is_over = True
            self.returned = list(pieces(returned))
            self._is_over = False
            if isinstance(returned, Mapping) and "weight" in returned:
                return {**returned, "weight": 1}
            return returned

        return begin

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_over:
            return func(*args, **kwargs)
        name = func.name().partition(".")[0].removeprefix("aten::")
        written = [value for value, is_written, _ in arguments(func, args, kwargs) if is_written]
        inputs = [
            piece
            for value, is_written, is_out in arguments(func, args, kwargs)
            if not (is_written and (is_out or name in OVERWRITES))
            for piece in pieces(value)
        ]
        # A write to a part of a tensor changes the whole tensor. In backward such tensors are
        # gradients, in a single vector.
        is_forward = current_backward_call() is None
        parts = list(_parts(written)) if is_forward else []
        inputs += [text for whole, extent in parts for text in (extent, tensor_text(whole))]
        own = self._is_own(kwargs.get("generator"))
        returned = func(*args, **kwargs)
        if name in EMPTY:
            returned.fill_(self._fill)
        outputs = [*pieces(returned), *(piece for value in written for piece in pieces(value))]
        outputs += [tensor_text(whole) for whole, _ in parts]
        if isinstance(returned, torch.Tensor) and (text := extent_text(returned)) is not None:
            outputs.append(text)
        call_site, in_backward = self._call_sites.find(sys._getframe(1))
        self.calls.append(
            Call(
                operator=str(func),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                module=call_site.module,
                kind=call_site.kind,
                line=call_site.line,
                source=call_site.source,
                is_empty=name in EMPTY,
                is_random=torch.Tag.nondeterministic_seeded in func.tags,
                own_generator=own,
                in_backward=in_backward,
            )
        )
        return returned

    def _is_own(self, generator: Any) -> bool:
        if generator is None:
            return False
        stream = self._stream
        return not stream.drawn or not is_same_generator(generator, stream.generator)


def traced(
    replica: Replica, data: Any, stream: Stream, seed: int, fill: int
) -> tuple[list[Call], dict[str, str]]:
    """Compute a shard; return the calls of operators, and the results by name.

    Args:
        data: the batch.
        stream: the calling thread's stream.
        seed: seed of the shard.
        fill: see ``OperatorTrace``.
    """
    trace = OperatorTrace(replica.model, stream, fill)
    with replica.watched(trace.watch), trace:
        # With weight 1, the results are those of autograd, by which calls are found.
        result = replica.gradient(data, 1, stream, seed, at=trace.phase)
    assert result.gradient is not None
    results = {name: repr(value) for name, value in result.metrics.items()}
    results |= {name: tensor_text(view) for name, view in result.gradient.named.items()}
    results |= {f"loss function {n}": text for n, text in enumerate(trace.returned)}
    replica.recycle(result)
    return trace.calls, results


def _parts(values: Sequence[Any]) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield the base tensors of views of a part, with a text for the part."""
    for value in values:
        if isinstance(value, torch.Tensor) and (whole := base_of(value)) is not None:
            text = extent_text(value)
            if text is not None:
                yield whole, text
