"""Random streams: a default generator of torch for each thread.

torch's default CPU generator belongs to the process. Dropout masks of two towers would depend on
thread timing. A ``Stream`` gives the entering thread a generator: every random operation of torch
in this thread without a generator argument draws from the stream, also deep inside C++ (the dropout
of an LSTM) and in a backward pass on the CPU. All further threads are unaffected, and the lock of
the process-wide generator, which makes towers wait for each other, is not taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import TracebackType
from typing import Any

import torch

from quorate.coordination.keys import Seed as Seed
from quorate.coordination.keys import made
from quorate.replica import host_draws, torch_internals
from quorate.replica.torch_internals import Promise

# The operations that draw random numbers on the CPU, with the position of their generator: all
# further random operations (dropout, lstm, randn, kaiming_uniform_, ...) are composed of these. A
# test compares the list with the operators of the installed torch.
RANDOM_OPERATORS: dict[str, int] = {
    "_sample_dirichlet": 1,
    "_standard_gamma": 1,
    "bernoulli.out": 1,
    "bernoulli_.Tensor": 2,
    "bernoulli_.float": 2,
    "binomial": 2,
    "cauchy_": 3,
    "exponential_": 2,
    "geometric_": 2,
    "log_normal_": 3,
    "multinomial": 3,
    "multinomial.out": 3,
    "normal.Tensor_Tensor": 2,
    "normal.Tensor_Tensor_out": 2,
    "normal.Tensor_float": 2,
    "normal.Tensor_float_out": 2,
    "normal.float_Tensor": 2,
    "normal.float_Tensor_out": 2,
    "normal_": 3,
    "poisson": 1,
    "random_": 1,
    "random_.from": 3,
    "random_.to": 2,
    "randperm.generator_out": 1,
    "rrelu_with_noise": 5,
    "rrelu_with_noise.out": 5,
    "rrelu_with_noise_": 5,
    "uniform_": 3,
}

# Operations composed of the above, but below the point where a ``TorchDispatchMode`` of the user is
# called (selective checkpointing, a counter of operations). From there on the thread's dispatch key
# is off, so they need their generator before. To each the overload that takes a generator.
COMPOSITE_OPERATORS: dict[str, str] = {
    "bernoulli": "bernoulli",
    "bernoulli.Tensor": "bernoulli.Tensor",
    "bernoulli.p": "bernoulli.p",
    "normal.float_float": "normal.float_float",
    "normal.float_float_out": "normal.float_float_out",
    "rand": "rand.generator",
    "rand.generator": "rand.generator",
    "rand.out": "rand.generator_out",
    "rand.generator_out": "rand.generator_out",
    "rand_like": "rand_like.generator",
    "randint": "randint.generator",
    "randint.generator": "randint.generator",
    "randint.out": "randint.generator_out",
    "randint.generator_out": "randint.generator_out",
    "randint.low": "randint.low_generator",
    "randint.low_generator": "randint.low_generator",
    "randint.low_out": "randint.low_generator_out",
    "randint.low_generator_out": "randint.low_generator_out",
    "randint_like": "randint_like.generator",
    "randint_like.low_dtype": "randint_like.low_generator_dtype",
    "randn": "randn.generator",
    "randn.generator": "randn.generator",
    "randn.out": "randn.generator_out",
    "randn.generator_out": "randn.generator_out",
    "randn_like": "randn_like.generator",
    "randperm": "randperm.generator",
    "randperm.generator": "randperm.generator",
    "randperm.out": "randperm.generator_out",
}


class _CallingThread(threading.local):
    """What the calling thread draws from."""

    stream: Stream | None = None  # the innermost; None: the process's generator


_local = _CallingThread()


class Stream:
    """The default CPU generator of one thread, while the thread is inside the context.

    Example:
        with Stream() as stream:
            stream.reseed(key("shard", seed, step, shard))
            model(x)    # draws from the stream

    Must be entered and left by the same thread. ``torch.manual_seed``, ``get_rng_state`` and
    ``fork_rng`` (and so ``torch.utils.checkpoint``) refer to the stream while a thread is inside.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self._seed: Seed | None = None
        self._guard: AbstractContextManager[object] | None = None  # can be entered repeatedly
        self._outer: Stream | None = None  # of the same thread
        self.kinds: frozenset[str] = frozenset()  # of devices that draw from the stream too

    def reseed(self, seed: Seed) -> None:
        """Restart from a 64-bit key. Costs nothing until a number is drawn."""
        self._seed = seed

    @property
    def drawn(self) -> bool:
        """True if a number was drawn since ``reseed``."""
        return self._seed is None

    @property
    def generator(self) -> torch.Generator:
        """The generator of the draws, seeded with the latest key."""
        if self._seed is not None:
            self._generator.manual_seed(made(self._seed))
            self._seed = None
        return self._generator

    def __enter__(self) -> Stream:
        if self._guard is None:
            _intercept()
            self._guard = torch_internals.intercepted()
        self._guard.__enter__()
        self._outer = _local.stream
        _local.stream = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._guard is not None
        self._guard.__exit__(kind, error, trace)
        innermost = _local.stream
        if innermost is self:
            _local.stream = self._outer
        elif innermost is not None:
            # Loops over updates that overlap end in any order: streams entered later stay.
            inner: Stream | None = innermost
            while inner is not None and inner._outer is not self:
                inner = inner._outer
            if inner is not None:
                inner._outer = self._outer
            assert innermost._guard is not None
            innermost._guard.__exit__(None, None, None)  # they had no effect inside this guard
            innermost._guard.__enter__()

    @contextmanager
    def of_devices(self, kinds: frozenset[str]) -> Iterator[None]:
        """Let these kinds of devices draw from the stream inside the block: see ``host_draws``.

        A backward pass may repeat a part of the forward pass, and so runs in the calling thread,
        not in torch's threads for devices: they have no stream.
        """
        _intercept_fused()
        outer, self.kinds = self.kinds, kinds
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            self.kinds = outer

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Use the stream in the calling thread too, inside the block.

        For threads outside of the stream: a device's backward pass runs in a thread of torch, while
        the stream's own thread waits, and a ``TorchDispatchMode`` is called with dispatch keys off.
        """
        outer = _local.stream
        _local.stream = self
        try:
            with torch_internals.intercepted_anyway():
                yield
        finally:
            _local.stream = outer


class _ThreadDefault:
    """A substitute for the default generator of ``torch.random``: the thread's stream, if any."""

    def __init__(self, process_wide: torch.Generator) -> None:
        self._process_wide = process_wide

    def __getattr__(self, name: str) -> Any:
        stream = _local.stream
        return getattr(self._process_wide if stream is None else stream.generator, name)


@cache
def _intercept() -> torch.library.Library | None:
    """Register the kernels of streams, once per process.

    They run only in threads that have enabled their dispatch key, so nothing has to be undone.
    """
    if not torch_internals.holds(Promise.STREAMS):
        return None  # reported at import: models draw from the process's generator
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, position in RANDOM_OPERATORS.items():
        if (operator := _overload(name)) is None:
            continue  # another torch: the test of this list finds its operators
        library.impl(name, _kernel(operator, position), torch_internals.STREAM_KEY)
    for name, other in COMPOSITE_OPERATORS.items():
        if (operator := _overload(name)) is not None and (taking := _overload(other)) is not None:
            library.impl(name, _kernel(operator, None, taking), torch_internals.STREAM_KEY)
    torch_internals.replace_default_generator(_ThreadDefault)
    kept: torch.library.Library = library  # its kernels live as long as the library
    return kept


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _kernel(operator: Any, position: int | None, taking: Any = None) -> Callable[..., Any]:
    """Return a kernel of an operator, with draws from the thread's stream.

    Args:
        position: position of the generator among the arguments, if allowed there.
        taking: the overload with a generator argument, if the operator has none.
    """

    def draw(*args: Any, **kwargs: Any) -> Any:
        if position is not None and len(args) > position:  # the generator was passed by position
            args, kwargs["generator"] = args[:position], args[position]
        runs, given = operator, kwargs.get("generator")
        # An explicit default generator means the thread's.
        if given is None or torch_internals.is_same_generator(given, torch.default_generator):
            first = next((a for a in args if isinstance(a, torch.Tensor)), kwargs.get("out"))
            device = kwargs.get("device") or (None if first is None else first.device)
            # None in a thread of autograd, which has the key of the calling thread. It repeats the
            # forward pass of a checkpoint, with the state restored by the checkpoint.
            stream = _local.stream
            if stream is not None and not torch_internals.is_traced():
                if device is None or device.type == "cpu":
                    runs, kwargs["generator"] = taking or operator, stream.generator
                elif device.type in stream.kinds:
                    kwargs.pop("generator", None)
                    with torch_internals.passed_on():
                        runs = taking or operator
                        return host_draws.draw(runs, args, kwargs, device, stream.generator)
        with torch_internals.passed_on():
            return runs(*args, **kwargs)

    return draw


@cache
def _intercept_fused() -> torch.library.Library:
    """Register the kernels of operators that draw on devices only, once per process."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    replaced = {"native_dropout": host_draws.dropout}
    for name in (*replaced, *host_draws.FUSED):
        if (operator := _overload(name)) is not None:
            kernel = _fused_kernel(operator, replaced.get(name), host_draws.FUSED.get(name, ""))
            library.impl(name, kernel, torch_internals.STREAM_KEY)
    kept: torch.library.Library = library
    return kept


def _fused_kernel(
    operator: Any, instead: Callable[..., Any] | None, fix: str
) -> Callable[..., Any]:
    """Return a kernel of an operator that draws on devices only.

    Args:
        instead: computes the same from draws on the host; None: the operator is refused.
        fix: the cure in a refusal.
    """

    def compute(*args: Any, **kwargs: Any) -> Any:
        stream = _local.stream
        if (
            stream is not None
            and stream.kinds
            and not torch_internals.is_traced()
            and host_draws.draws(operator, args, kwargs)
        ):
            if instead is not None:
                return instead(*args, **kwargs)
            host_draws.refuse(operator, fix)
        with torch_internals.passed_on():
            return operator(*args, **kwargs)

    return compute


@contextmanager
def without_stream() -> Iterator[None]:
    """Draw from the process's generator in the calling thread inside the block.

    For torch's compiler: otherwise the stream's generator would enter the graph of traced
    operators.
    """
    outer = _local.stream
    _local.stream = None
    try:
        with torch_internals.passed_on():
            yield
    finally:
        _local.stream = outer
