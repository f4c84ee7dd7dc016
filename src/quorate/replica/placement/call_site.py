"""The call site of an operator: the module of the model, and the line.

In the backward pass no module of the model runs. There an operator belongs to a node of the graph,
with the sequence number of the derived forward call.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from quorate.replica.torch_internals import current_backward_call, last_forward_call

# torch, and this package: kernels of streams stand between the user's code and an operator.
LIBRARIES = (str(Path(torch.__file__ or "").parent), str(Path(__file__).parents[2]))


@dataclass(frozen=True)
class CallSite:
    """The place in the user's code where an operator was called."""

    module: str = ""  # path in the model
    kind: str = ""  # class of the module; empty: outside of the model's modules
    line: str = ""  # file:line
    source: str = ""

    def said(self, *, in_backward: bool) -> str:
        """Return ``module 'encoder.0' (Linear)``, for a sentence."""
        if not self.kind:
            return "the loss function, outside of modules"
        name = f"module {self.module!r}" if self.module else "the model"
        return f"{'the backward pass of ' * in_backward}{name} ({self.kind})"


class CallSites:
    """A finder of call sites, while a shard is computed.

    Args:
        model: the model, for names of modules.
        until: file of the frame where the search ends: the code that computes a shard.
    """

    def __init__(self, model: torch.nn.Module, until: str = "") -> None:
        self._names = {id(m): (path, type(m).__name__) for path, m in model.named_modules()}
        self._until = until
        self._forward: dict[int, CallSite] = {}  # of forward calls, by autograd's sequence number

    def clear(self) -> None:
        """Forget all calls: a shard is begun again."""
        self._forward.clear()

    def find(self, frame: FrameType | None) -> tuple[CallSite, bool]:
        """Return the call site, or in backward that of the forward call; and whether in backward.

        Must be called with each operator call, otherwise derivatives are not found.
        """
        call_site = self._of(frame)
        call = current_backward_call()
        if call is not None:
            forward = self._forward.get(call, CallSite())
            # A line of user code in backward is a line of a hook.
            line = call_site if call_site.line else forward
            return CallSite(forward.module, forward.kind, line.line, line.source), True
        # The node of this call, if there is one, was numbered just before.
        self._forward.setdefault(last_forward_call(), call_site)
        return call_site, False

    def _of(self, frame: FrameType | None) -> CallSite:
        """Return the innermost module, and the innermost line outside of torch and quorate."""
        module = kind = line = source = ""
        while frame is not None and frame.f_code.co_filename != self._until:
            file = frame.f_code.co_filename
            if not line and not file.startswith((*LIBRARIES, "<")):
                line = f"{Path(file).name}:{frame.f_lineno}"
                source = linecache.getline(file, frame.f_lineno).strip()
            if not kind and frame.f_code.co_varnames[:1] == ("self",):
                module, kind = self._names.get(id(frame.f_locals["self"]), ("", ""))
            frame = frame.f_back
        return CallSite(module, kind, line, source)
