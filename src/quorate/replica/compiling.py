"""Compiling beside other threads, and ``torch.compile`` in user code.

torch's compiler traces one graph at a time, for the process, and draws random numbers meanwhile. So
whoever compiles a shard is alone in the process, and computes the shard once more when all of it is
compiled. A shard that compiles nothing runs beside others.

Which bits a shard gets must not depend on who computed it, nor on what that worker computed before.
So user code is compiled under ``torch_internals.repeatable_compiler``. Code that watches operators
or modules sees nothing of a graph, and torch would never again compile what it meets under a
``TorchDispatchMode``: within ``eagerly`` nothing is compiled, and compiled code runs as written.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TypeVar
from weakref import WeakKeyDictionary, ref

import torch

from quorate.errors import CompileError, CopyError
from quorate.replica import torch_internals
from quorate.replica.shared import generators

# Runs after the first compilation until one compiles nothing: models of Hugging Face's set values
# of their configuration in their first forward pass, and are compiled anew for those.
MOST_TRIES = 3
# Shards of one replica for which user code may compile something: each new shape does, in training
# and in evaluation.
MOST_COMPILING = 64

T = TypeVar("T")


class Gate:
    """Many threads compute what is compiled, or one compiles, alone in the process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_taken = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Compute within the block, beside other threads. Waits for one that is alone."""
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
        """Compile within the block. Waits for all other threads. Not to be entered twice."""
        with ExitStack() as stack:
            with self._changed:
                while self._is_taken:
                    self._changed.wait()
                self._is_taken = True
                stack.callback(self._leave)
                while self._inside:
                    self._changed.wait()
            # The compiler's own warnings say nothing that a user can do something about. No other
            # thread computes now, and so none of them loses a warning.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield

    def _leave(self) -> None:
        with self._changed:
            self._is_taken = False
            self._changed.notify_all()


gate = Gate()  # the compiler is the process's


# --- user code that compiles ----------------------------------------------------------------------


class _CompilesError(BaseException):
    """A shard that runs beside others is about to compile something.

    No ``Exception``: user code must not take it for its own.
    """


class _Shard(threading.local):
    """What the shard does that the calling thread computes."""

    is_begun = False
    may_compile = False
    has_compiled = False


_shard = _Shard()


def _started(_: object) -> None:
    """Note that the compiler begins, in the thread that called compiled code."""
    if not _shard.is_begun:
        return  # a callback, or a thread of the script's
    _shard.has_compiled = True
    if not _shard.may_compile:
        raise _CompilesError


@contextmanager
def _begun(*, may_compile: bool) -> Iterator[None]:
    """Compute a shard within the block; ``_shard.has_compiled`` says what it did."""
    torch_internals.tell_compilations(_started)
    _shard.is_begun, _shard.may_compile, _shard.has_compiled = True, may_compile, False
    try:
        yield
    finally:
        _shard.is_begun = False


class UserCompiles:
    """Runs the shards of one replica whose user code may call ``torch.compile``."""

    def __init__(self) -> None:
        self._compiling = 0  # shards so far for which something was compiled

    def run(self, work: Callable[[], T]) -> T:
        """Run ``work()``, which must give the same result when it is run again.

        Raises:
            CompileError: user code compiles something for one shard after the other.
            Whatever the user's code raises, and torch's compiler.
        """
        if torch_internals.compiler_is_in_use():
            try:
                with gate.shared(), _begun(may_compile=False):
                    return work()
            except _CompilesError:
                pass
        else:
            try:
                result = work()
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
                    result = work()
                if not _shard.has_compiled:
                    break
                # Once more: what the compiler drew would be taken for a draw of the model's.
                generators.restore(before)
        return result


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled user code as it is written, within the block. The process compiles nothing."""
    if not torch_internals.compiler_is_in_use():
        yield
        return
    with gate.alone(), torch.compiler.set_stance("force_eager"):
        yield


def as_written() -> AbstractContextManager[object]:
    """Return a context in which compiled user code runs as it is written.

    For trials before there are workers, when one thread computes: see ``eagerly``.
    """
    if not torch_internals.compiler_is_in_use():  # and to import it takes seconds
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


# --- compiled models ------------------------------------------------------------------------------
# What ``torch.compile(model)`` returns is a module around the model, of which every parameter has
# another name. The model itself is trained and saved; the loss function is called with the other.

_Compiler = Callable[[torch.nn.Module], torch.nn.Module]
# By the model: what the script made of it, as long as it is there, and how to make another.
_given: WeakKeyDictionary[torch.nn.Module, tuple[ref[torch.nn.Module], _Compiler]]
_given = WeakKeyDictionary()


def original_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that was given to ``torch.compile``, or the model if none was."""
    original = torch_internals.compiled_original(model)
    if original is None:
        return model
    _given[original] = ref(model), torch_internals.compiler_of(model)
    return original


def as_given(model: torch.nn.Module, copied: torch.nn.Module | None = None) -> torch.nn.Module:
    """Return what the script made of a model by ``torch.compile``, or the model.

    Args:
        model: what ``original_of`` returned.
        copied: a copy of it: what is returned is made of that.
    """
    copied = model if copied is None else copied
    if model not in _given:
        return copied
    given, compiler = _given[model]
    known = given() if copied is model else None
    return compiler(copied) if known is None else known


def is_compiled_by_script(model: torch.nn.Module, given: torch.nn.Module, loss: object) -> bool:
    """Return whether a script compiled a model, a module in it, or the loss function.

    Functions that ``forward`` calls are not looked at.

    Args:
        model: of a replica.
        given: what the loss function is called with: see ``as_given``.
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
    """Compile the calls of a copy's modules where ``module.compile()`` did for the model's.

    Raises:
        CopyError: torch does not tell how.
    """
    for (name, module), other in zip(model.named_modules(), copied.modules(), strict=False):
        if not torch_internals.compile_call_as(module, other):
            reason = f"its module {name!r} was compiled by compile(), in a way that has no copy"
            raise CopyError("engine", "towers", reason, "use engine='processes'")
