"""The trace of operators: each call's inputs and outputs as hashes, and where it came from."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quorate
from quorate import replica
from quorate.loss import Loss
from quorate.streams import RANDOM_OPERATORS, Stream
from quorate.verify.calls import Call
from quorate.verify.values import pieces

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
_autograd: Any = torch.autograd
LIBRARIES = [str(Path(module.__file__ or "").parent) for module in (torch, quorate)]


class OperatorTrace(TorchDispatchMode):
    """Within a ``with`` block each operator that this thread calls is noted, also in backward.

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
        self._names = {id(m): (path, type(m).__name__) for path, m in model.named_modules()}
        self._stream = stream
        self._fill = fill
        self._is_over = False
        self._places: dict[int, _Place] = {}  # of forward calls, by what autograd numbers them

    def phase(self, name: str) -> None:
        """To be told what phase of the shard begins: what comes after backward is not noted."""
        self._is_over = name == "pushing"

    def watch(self, loss: Loss) -> Loss:
        """The loss function, before which all is forgotten: a shard may be begun once more."""

        def begin(model: torch.nn.Module, batch: Any) -> Any:
            self.calls.clear()
            self._places.clear()
            returned = loss(model, batch)
            self._is_over = True
            self.returned = list(pieces(returned))
            self._is_over = False
            return returned

        return begin

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_over:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        written = [value for value, is_written, _ in _arguments(func, args, kwargs) if is_written]
        inputs = [
            piece
            for value, is_written, is_out in _arguments(func, args, kwargs)
            if not (is_written and (is_out or name in OVERWRITES))
            for piece in pieces(value)
        ]
        own = self._is_own(kwargs.get("generator"))
        returned = func(*args, **kwargs)
        if name in EMPTY:
            returned.fill_(self._fill)
        outputs = [*pieces(returned), *(piece for value in written for piece in pieces(value))]
        place, in_backward = self._place()
        self.calls.append(
            Call(
                operator=str(func),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                module=place.module,
                kind=place.kind,
                line=place.line,
                source=place.source,
                is_empty=name in EMPTY,
                own_generator=own,
                in_backward=in_backward,
            )
        )
        return returned

    def _is_own(self, generator: torch.Generator | None) -> bool:
        if generator is None or generator.device.type != "cpu":
            return False
        return not self._stream.drawn or generator is not self._stream.generator

    def _place(self) -> tuple[_Place, bool]:
        """Who called: in backward, of what call in forward it is the derivative."""
        place = _Place.of(sys._getframe(2), self._names)
        node: Any = torch._C._current_autograd_node()  # None in forward
        if node is not None:
            forward = self._places.get(node._sequence_nr(), _Place())
            # A line of the user's in backward is one of a hook.
            line = place if place.line else forward
            return _Place(forward.module, forward.kind, line.line, line.source), True
        # The node of this call, if it has one, was numbered just before.
        number = _autograd._get_sequence_nr() - 1
        self._places.setdefault(number, place)
        return place, False


class _Place:
    """Where in the user's code an operator was called."""

    def __init__(self, module: str = "", kind: str = "", line: str = "", source: str = "") -> None:
        self.module = module
        self.kind = kind
        self.line = line
        self.source = source

    @classmethod
    def of(cls, frame: FrameType | None, names: Mapping[int, tuple[str, str]]) -> _Place:
        """The innermost module, and the innermost line that is neither torch's nor quorate's."""
        place = cls()
        while frame is not None and frame.f_code.co_filename != replica.__file__:
            file = frame.f_code.co_filename
            if not place.line and not file.startswith((*LIBRARIES, "<")):
                place.line = f"{Path(file).name}:{frame.f_lineno}"
                place.source = linecache.getline(file, frame.f_lineno).strip()
            if not place.kind and frame.f_code.co_varnames[:1] == ("self",):
                place.module, place.kind = names.get(id(frame.f_locals["self"]), ("", ""))
            frame = frame.f_back
        return place


def _arguments(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, bool, bool]]:
    """Each argument, whether it is written, and whether it is an ``out``: written only."""
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args) and not argument.kwarg_only:
            value = args[number]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        written = argument.alias_info is not None and argument.alias_info.is_write
        yield value, written, written and argument.kwarg_only
