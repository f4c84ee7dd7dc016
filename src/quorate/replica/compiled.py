"""Compiled loss functions: ``torch.compile``, once per shape of a shard.

The loss function is compiled with all functions that it calls, so the model stays unchanged: no
attribute and no name changes. The bits must not depend on the shapes computed before, nor on the
worker. So every shape has a graph of its own (no dynamic shapes), no kernel is chosen by a
measurement, random numbers are drawn by the operators of uncompiled code, from the shard's stream,
and code that cannot be compiled is an error. Whether to compile is decided once for all workers,
where a shard is tried before any worker starts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from quorate.errors import CompileError, UserError
from quorate.replica.beside import traced_values
from quorate.replica.beside.asks import asks_for_at
from quorate.replica.beside.shared import all_read, are_any
from quorate.replica.beside.traced import TracedAt, handed_over
from quorate.replica.compiling import MOST_TRIES, gate
from quorate.replica.loss import Loss
from quorate.replica.nested import parts, tensors
from quorate.replica.shared import generators
from quorate.replica.streams import without_stream
from quorate.replica.torch_internals import run_inductor, strict_compiler

MOST_SHAPES = 32  # of one replica, in training and in evaluation
MOST_REPEATS = 32  # compilations of one replica for batches of known shapes
# Number of later steps to try: at least one of them has to compile nothing. Otherwise the code is
# assumed to compile in every step.
MOST_WAYS = 8

T = TypeVar("T")
_local = threading.local()


class Compiled:
    """A loss function, compiled when called within ``run``. Used by one thread at a time.

    Args:
        loss: the user's loss function.
        threads: intra-op threads of the worker: kernels are compiled for this number.
    """

    def __init__(self, loss: Loss, *, threads: int) -> None:
        self.plain = loss
        self._known: set[object] = set()
        self._repeats = 0
        self._asks_for_at = asks_for_at(loss)
        self._later = 0  # steps added to ``at`` in a trial; see ``traced_values`` too

        self._reads_shared = reads_shared = are_any()

        # Plain functions, because a loss function may be any callable object. Replicas of one
        # process share the compiled code.
        def plain(model: torch.nn.Module, batch: Any) -> Any:
            return loss(model, batch)

        def told(model: torch.nn.Module, batch: Any, *at: Any) -> Any:
            return loss(model, batch, TracedAt(*at))

        called = told if self._asks_for_at else plain

        def reading(model: torch.nn.Module, batch: Any, handed: Any, *at: Any) -> Any:
            traced_values.begin(handed)
            try:
                return called(model, batch, *at)
            finally:
                traced_values.begin(None)

        self._compiled: Loss = torch.compile(
            reading if reads_shared else called,
            backend=_inductor(threads),
            dynamic=False,
            fullgraph=reads_shared,
        )

    def __call__(self, model: torch.nn.Module, batch: Any, *at: Any) -> Any:
        """Compute the loss by compiled code, or compile the code for this shape."""
        numbers = handed_over(at[0], self._later) if self._asks_for_at else ()
        if self._reads_shared:
            values = traced_values.handed_over(all_read(), self._later)
            return self._compiled(model, batch, values, *numbers)
        return self._compiled(model, batch, *numbers)

    def run(self, batch: Any, *, training: bool, work: Callable[[Loss], T]) -> T:
        """Run ``work(loss)``, whose result must not depend on repetition.

        Compiling draws random numbers, so newly compiled code is run a second time. All threads of
        the process wait meanwhile: torch traces a single graph at a time.

        Args:
            batch: the batch for the loss function.
            training: whether a backward pass follows.

        Raises:
            CompileError: the code cannot be compiled, or there are too many shapes.
            Exception: an error of the user's code.
        """
        kind = (training, signature(batch))
        if kind in self._known:
            with gate.shared():
                drawn = torch.default_generator.get_state()
                result, compiled = self._observed(work)
            if not compiled:
                return result
            torch.default_generator.set_state(drawn)
            # A Python value used by the code has changed, for example a counter in the model.
            self._repeats += 1
            if self._repeats > MOST_REPEATS:
                raise CompileError(
                    f"code was compiled again {self._repeats} times for shapes that had been "
                    "compiled, because "
                    "the code depends on a Python value that changes, such as a counter in the "
                    "model",
                    "make that value a tensor, or leave compile off",
                )
        elif len(self._known) >= MOST_SHAPES:
            raise CompileError(
                f"more than {MOST_SHAPES} shapes of a shard, the last one {described(batch)}",
                "pad to a few lengths, or leave compile off",
            )
        with gate.alone():
            if kind not in self._known:
                try:
                    with generators.kept():
                        self._observed(work)
                        if (self._asks_for_at or self._reads_shared) and not self._known:
                            self._try_later_steps(work)
                except UserError:
                    raise
                except Exception as error:  # of the user's code, or of torch's compiler
                    work(self.plain)  # raises an error of the user's code as it is
                    raise CompileError(
                        f"a shard of {described(batch)} cannot be compiled: {reason(error)}"
                    ) from error
                self._known.add(kind)
            for _ in range(MOST_TRIES):
                before = generators.states()
                result, compiled = self._observed(work)
                if not compiled:
                    break
                # Again: numbers drawn by the compiler would be taken for draws of the model.
                generators.restore(before)
            return result

    def _try_later_steps(self, work: Callable[[Loss], T]) -> None:
        """Compute the shard as if at later steps, to see whether each step compiles new code.

        Raises:
            CompileError: each step compiles new code.
        """
        try:
            for self._later in range(1, MOST_WAYS + 1):
                if not self._observed(work)[1]:
                    return
        finally:
            self._later = 0
        numbers, example = "at.step or at.progress", "at.progress"
        if self._reads_shared:
            numbers, example = "a number of a Shared", "the number"
            numbers = f"at.step, at.progress or {numbers}" if self._asks_for_at else numbers
        raise CompileError(
            f"the loss function depends on the Python value of {numbers}, and would be compiled "
            "again for "
            "each step",
            f"compute with torch.tensor({example}), or leave compile off",
        )

    def _observed(self, work: Callable[[Loss], T]) -> tuple[T, bool]:
        """Return the result of ``work``, and whether code was compiled for it."""
        _local.compiled = False
        with strict_compiler():
            result = work(self)
        return result, bool(_local.compiled)


def signature(batch: Any) -> object:
    """Return the properties that a graph is compiled for: structure, shapes, dtypes, numbers.

    Texts are not among them.
    """
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape), batch.stride(), batch.dtype, batch.device, batch.requires_grad
    if (inner := parts(batch)) is not None:
        return type(batch), tuple((name, signature(part)) for name, part in inner)
    if batch is None or isinstance(batch, (bool, int, float)):
        return type(batch), batch
    return type(batch)


def described(batch: Any) -> str:
    """Return the shapes in a batch: ``64x1x28x28, 64``."""
    shapes = ["x".join(map(str, tensor.shape)) or "a scalar" for tensor in tensors(batch)]
    return ", ".join(shapes) or "no tensors"


def reason(error: BaseException) -> str:
    """Return the reason why code cannot be compiled, as one line."""
    inner = getattr(error, "inner_exception", None) or error
    kind = type(inner).__name__
    if kind == "InvalidCxxCompiler":
        return "no C++ compiler works here (g++ or clang++; CXX names another)"
    if kind == "TritonMissing":
        return "Triton is not installed, which writes the kernels of a GPU"
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{kind}: {lines[0]:.300}" if lines else kind


# --- torch's compiler ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Inductor:
    """torch's default backend, configured to make the same code wherever a shape is compiled."""

    threads: int

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        _local.compiled = True
        options = {
            # Random operators are not compiled, and draw from the shard's stream.
            "fallback_random": True,
            # No kernel is chosen by measured speed: another kernel rounds differently.
            "deterministic": True,
            "cpp.threads": self.threads,
            "compile_threads": 1,  # no processes that outlive the training
        }
        with without_stream(), generators.kept():
            return run_inductor(graph, inputs, options)


@cache
def _inductor(threads: int) -> _Inductor:
    return _Inductor(threads)
