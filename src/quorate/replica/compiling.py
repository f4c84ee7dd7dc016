"""Compiling beside other threads, and ``torch.compile`` in user code.

torch's compiler traces a single graph at a time per process, and draws random numbers meanwhile. So
a thread has to be alone in the process to compile a shard, and computes the shard again when all of
its code is compiled. A shard without new code runs beside other shards.

The bits of a shard must not depend on the worker, nor on earlier shards of the worker. So user code
is compiled under ``torch_internals.repeatable_compiler``. Watchers of operators or modules see
nothing inside of a graph, and torch would never again compile code met under a
``TorchDispatchMode``: inside ``eagerly`` nothing is compiled, and compiled code runs as written.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

import torch

from quorate.errors import CompileError, CopyError
from quorate.replica import torch_internals
from quorate.replica.shared import generators

# Largest number of runs until one compiles nothing: Hugging Face's models set values of their
# configuration in the first forward pass, and are then compiled a second time.
MOST_TRIES = 3
# Number of shards per replica with compilations by user code: each new shape causes a compilation,
# in training and in evaluation.
MOST_COMPILING = 64

T = TypeVar("T")
P = ParamSpec("P")


class CompileGate:
    """A lock: many threads run compiled code, or one thread compiles, alone in the process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_taken = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Compute inside the block, beside other threads. Waits while a thread compiles."""
        with self._changed:
            while self._is_taken:
                self._changed.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compile inside the block. Waits for all other threads. Must not be nested."""
        with ExitStack() as stack:
            with self._changed:
                while self._is_taken:
                    self._changed.wait()
                self._is_taken = True
                stack.callback(self._leave)
                while self._inside:
                    self._changed.wait()
            # The compiler's own warnings are of no use to the user. No other thread computes now,
            # so no warning of another thread is lost.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield

    def _leave(self) -> None:
        with self._changed:
            self._is_taken = False
            self._changed.notify_all()


gate = CompileGate()  # the compiler belongs to the process


# --- user code that compiles ----------------------------------------------------------------------


class _CompilesError(BaseException):
    """The signal of a shard about to compile code beside other shards.

    Not an ``Exception``: user code must not catch the signal.
    """


class _ThreadShard(threading.local):
    """The state of the shard that the calling thread computes."""

    is_begun = False
    may_compile = False
    has_compiled = False


_shard = _ThreadShard()


def _started(_: object) -> None:
    """Note the start of the compiler, in the thread with the call of compiled code."""
    if not _shard.is_begun:
        return  # a callback, or a thread of the script
    _shard.has_compiled = True
    if not _shard.may_compile:
        raise _CompilesError


@contextmanager
def _begun(*, may_compile: bool) -> Iterator[None]:
    """Compute a shard inside the block; afterwards ``_shard.has_compiled`` is set."""
    torch_internals.tell_compilations(_started)
    _shard.is_begun, _shard.may_compile, _shard.has_compiled = True, may_compile, False
    try:
        yield
    finally:
        _shard.is_begun = False


class UserCompiles:
    """The runner of a replica's shards with user code that may call ``torch.compile``."""

    def __init__(self) -> None:
        self._compiling = 0  # number of shards that have compiled code

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work(*args, **kwargs)``, whose result must not depend on repetition.

        Raises:
            CompileError: user code compiles code again and again.
            Exception: an error of the user's code, or of torch's compiler.
        """
        if torch_internals.compiler_is_in_use():
            try:
                with gate.shared(), _begun(may_compile=False):
                    return work(*args, **kwargs)
            except _CompilesError:
                pass
        else:
            try:
                result = work(*args, **kwargs)
            except Exception:
                if not torch_internals.compiler_is_in_use():
                    raise
            if not torch_internals.compiler_is_in_use():
                return result
        self._compiling += 1
        if self._compiling > MOST_COMPILING:
            raise CompileError(
                "code that the script compiles with torch.compile was compiled again for "
                f"{MOST_COMPILING} "
                "shards, because the code depends on a Python value that changes, or shards have "
                "too many shapes",
                "make that value a tensor, pad to a few lengths, or leave torch.compile out",
            )
        with gate.alone(), torch_internals.repeatable_compiler():
            for _ in range(MOST_TRIES):
                before = generators.states()
                with _begun(may_compile=True):
                    result = work(*args, **kwargs)
                if not _shard.has_compiled:
                    break
                # Again: numbers drawn by the compiler would be taken for draws of the model.
                generators.restore(before)
        return result


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled user code as written inside the block. The process compiles nothing."""
    if not torch_internals.compiler_is_in_use():
        yield
        return
    with gate.alone(), torch.compiler.set_stance("force_eager"):
        yield


def as_written() -> AbstractContextManager[object]:
    """Return a context in which compiled user code runs as written.

    For trials before there are workers, with a single computing thread: see ``eagerly``.
    """
    if not torch_internals.compiler_is_in_use():  # importing the compiler takes seconds
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


# --- compiled models ------------------------------------------------------------------------------
# ``torch.compile(model)`` returns a module around the model, in which every parameter has another
# name. The model itself is trained and saved; the loss function is called with the outer module.

_Compiler = Callable[[torch.nn.Module], torch.nn.Module]
# By the model: the outer module, while alive, and the function that makes an outer module.
_given: WeakKeyDictionary[torch.nn.Module, tuple[ref[torch.nn.Module], _Compiler]]
_given = WeakKeyDictionary()


def original_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that was passed to ``torch.compile``; the model itself if none was."""
    original = torch_internals.compiled_original(model)
    if original is None:
        return model
    _given[original] = ref(model), torch_internals.compiler_of(model)
    return original


def as_given(model: torch.nn.Module, copied: torch.nn.Module | None = None) -> torch.nn.Module:
    """Return the module made by the script's ``torch.compile`` from a model, or the model.

    Args:
        model: the result of ``original_of``.
        copied: a copy of the model: a module is made around the copy.
    """
    copied = model if copied is None else copied
    if model not in _given:
        return copied
    given, compiler = _given[model]
    known = given() if copied is model else None
    return compiler(copied) if known is None else known


def is_compiled_by_script(model: torch.nn.Module, given: torch.nn.Module, loss: object) -> bool:
    """Return whether a script compiled a model, a module inside, or the loss function.

    Functions called by ``forward`` are not checked.

    Args:
        model: the model of a replica.
        given: the module passed to the loss function: see ``as_given``.
        loss: the user's loss function.
    """
    if given is not model or torch_internals.compiled_function(loss) is not None:
        return True
    return any(
        torch_internals.compiled_original(module) is not None
        or torch_internals.is_call_compiled(module)
        for module in model.modules()
    )


def compile_calls(model: torch.nn.Module, copied: torch.nn.Module) -> None:
    """Compile the calls of a copy's modules where the model's modules were compiled in place.

    Raises:
        CopyError: torch does not tell how they were compiled.
    """
    for (name, module), other in zip(model.named_modules(), copied.modules(), strict=False):
        if not torch_internals.compile_call_as(module, other):
            reason = f"its module {name!r} was compiled by compile(), in a way that has no copy"
            raise CopyError("engine", "towers", reason, "use engine='processes'")
