"""Sharing: objects of a model and a loss function shared by all towers of a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from quorate.errors import CopyError
from quorate.replica.shared.containers import SharedContents, written
from quorate.replica.shared.copies import copied_parts, refused
from quorate.replica.shared.references import SharedObjects, found
from quorate.replica.shared.switches import SwitchWatch
from quorate.replica.torch_internals import compiler_is_in_use
from quorate.replica.turns import Turns


def rows_use(model: torch.nn.Module, loads: Mapping[str, object]) -> str | None:
    """Return how the loading of rows reaches the trained model, or None.

    Args:
        loads: the dataset and its functions, by names for messages.
    """
    originals = {id(module): _named(name) for name, module in model.named_modules()}
    originals |= {id(p): f"the parameter {n!r}" for n, p in model.named_parameters()}
    return next(iter(found({}, loads, originals).originals), None)


def _named(module: str) -> str:
    return f"its module {module!r}" if module else "the model that is trained"


class SharingFindings:
    """The findings about a model and a loss function before any shard was computed.

    Args:
        model: the model, not changed; no tensor is copied, except those of scripted modules.
        loss: the loss function.
        copies: whether to try a copy.
    """

    def __init__(self, model: torch.nn.Module, loss: object, *, copies: bool = True) -> None:
        self.obstacle: str | None = None  # why towers cannot have copies
        self._copied: set[int] = set()  # ids of objects that each copy has itself
        self._found: SharedObjects = self._look(model, loss, copies)

    def _look(self, model: torch.nn.Module, loss: object, copies: bool) -> SharedObjects:
        if copies:
            try:
                copied, self._copied = copied_parts(model)
            except CopyError as error:
                self.obstacle = error.reason
            else:
                kept = {id(module) for module in copied.modules()}  # a module may be its own copy
                originals = {
                    id(module): _named(name)
                    for name, module in model.named_modules()
                    if id(module) not in kept
                }
                for name, p in model.named_parameters():
                    if p.requires_grad:
                        originals[id(p)] = f"the parameter {name!r}"
                originals |= {id(b): f"the buffer {name!r}" for name, b in model.named_buffers()}
                result = found({"the model": copied}, {"the loss function": loss}, originals)
                if result.originals:
                    self.obstacle = f"{result.originals[0]}, and a tower computes with a copy"
                return result
        return found({"the model": model}, {"the loss function": loss}, {})

    def tell(self, turns: Turns) -> None:
        """Pass the findings about the code to the turns of a process."""
        if self._found.switches:
            turns.require(f"{self._found.switches[0]} changes a setting of the whole process")
        if self._found.draws:
            turns.may_draw = self._found.draws[0]

    def contents(self) -> SharedContents:
        """Return the present content of all shared containers."""
        return SharedContents(self._found.containers, self._found.values)

    @contextmanager
    def watching(self, turns: Turns, *, towers: int, compiled: bool) -> Iterator[None]:
        """Watch a shard that is computed alone; its effects may make towers take turns.

        Args:
            towers: number of towers; 0 if workers are processes.
            compiled: whether the loss function is compiled: then no operator is seen, as with
                ``torch.compile`` in user code.

        Raises:
            CopyError: the shard writes to an object of the model with a separate copy per tower.
        """
        failed: Exception | None = None
        with ExitStack() as stack:
            containers = self._found.containers if towers else []
            changed = stack.enter_context(written(containers))
            watch = None
            if not compiled and not compiler_is_in_use():
                watch = stack.enter_context(SwitchWatch())
            try:
                yield
            except Exception as error:  # possibly caused by a write to another copy
                failed = error
        if watch is not None and watch.found:
            turns.require(f"a shard changes {watch.found[0]} for all threads of the process")
        for container in changed:
            if id(container.owner) in self._copied:
                raise refused(
                    f"{container.way} is written to, of which a tower has a copy"
                ) from failed
            if towers > 1:
                turns.require(f"a shard writes to {container.way}, and all towers share it")
        if failed is not None:
            raise failed
