"""The trace of operators: each call's inputs and outputs as hashes, and where it came from."""

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

# What these return is memory as it was found. In two traces it is made to differ.
EMPTY = {
    *("empty", "empty_like", "empty_strided", "empty_permuted"),
    *("new_empty", "new_empty_strided"),
}
# What these write they do not read.
OVERWRITES = {
    *("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"),
    *(name.partition(".")[0] for name in RANDOM_OPERATORS if "_" in name.partition(".")[0][-1:]),
}


class OperatorTrace(OperatorMode):
    """A note of each operator that this thread calls in a ``with`` block, also in backward.

    Args:
        model: whose modules are named.
        stream: the thread's; a draw from another generator is noted as such.
        fill: what memory holds that is not initialised. With other values in two traces, whoever
            reads it is found out.
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
        """Hear what phase of the shard begins: what comes after backward is not noted."""
        self._is_over = name == "pushing"

    def watch(self, loss: Loss) -> Loss:
        """Return the loss function, before which all is forgotten: a shard may be begun again.

        Its weight is 1: gradients are then handed over as autograd made them.
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
        # Whoever writes to a part of a tensor makes another one of the whole. In backward these
        # are gradients, which lie in one vector.
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
        stream: the calling thread's.
        seed: of the shard.
        fill: see ``OperatorTrace``.
    """
    trace = OperatorTrace(replica.model, stream, fill)
    with replica.watched(trace.watch), trace:
        # Of weight 1: what is handed over is what autograd made, by which calls are found.
        result = replica.gradient(data, 1, stream, seed, at=trace.phase)
    assert result.gradient is not None
    results = {name: repr(value) for name, value in result.metrics.items()}
    results |= {name: tensor_text(view) for name, view in result.gradient.named.items()}
    results |= {f"loss function {n}": text for n, text in enumerate(trace.returned)}
    replica.recycle(result)
    return trace.calls, results


def _parts(values: Sequence[Any]) -> Iterator[tuple[torch.Tensor, str]]:
    """Tensors of which some are views of a part, and which part that is."""
    for value in values:
        if isinstance(value, torch.Tensor) and (whole := base_of(value)) is not None:
            text = extent_text(value)
            if text is not None:
                yield whole, text
