"""The trace of a forward pass: a call with an example, with every operator recorded.

Modules are called as a whole, except modules that contain a split point: their forward is followed.
Everything is computed with the example's values while it is recorded, by the operators that run
without a trace; so a branch is decided, a loop counted, and each decision is checked in every shard
(``checks.py``). torch's own symbolic trace has no values, and stops there.
"""

from __future__ import annotations

import operator
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.overrides import is_tensor_method_or_property

from quorate.errors import CutError
from quorate.replica import nested
from quorate.replica.pipeline import checks
from quorate.replica.pipeline.followed import (
    ModuleAttributes,
    autocast,
    line_here,
    line_of,
    noticing_draws,
)
from quorate.replica.pipeline.listening import listening
from quorate.replica.pipeline.recorded import (
    RecordedValue,
    builder,
    inner,
    is_recorded,
    made_of,
    mapped,
    node_of,
    recorded_in,
    value_of,
)
from quorate.replica.torch_internals import version

_HOST = torch.device("cpu")
FREE = -1  # the stage of nodes available to every stage: arguments, parameters, constants

# Kinds of values for comparisons and branches in code; code receives the plain value, and the value
# is checked.
_FIXED = (bool, str, bytes, type(None), torch.dtype, torch.layout, torch.memory_format, type)
# Kinds of values stored in a graph directly.
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)
_WRITES = (operator.setitem, setattr)  # functions without a result


class TensorUse(NamedTuple):
    """A node's use of a tensor of a value, which the node may write."""

    node: fx.Node
    value: fx.Node  # the node that made the value
    storage: int  # address of the tensor's storage
    writes: bool


class ForwardTrace:
    """A forward pass as nodes, each in a stage.

    Args:
        model: the model in the mode for the trace.
        split: modules by name; a stage ends before the first call of each.
        inside: names of further modules whose forward is followed.
        devices: devices of the stages, dealt in turn. The example lies on the host, but forward is
            told that its tensors lie on these devices; empty: on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Mapping[str, nn.Module],
        inside: Sequence[str] = (),
        devices: Sequence[torch.device] = (),
    ) -> None:
        self.graph = fx.Graph()
        self.stages: dict[fx.Node, int] = {}
        self.without_grad: set[fx.Node] = set()  # nodes that run with gradients disabled
        self.values: dict[fx.Node, Any] = {}  # of the example
        self.uses: list[TensorUse] = []  # in order
        self.lines: dict[fx.Node, str] = {}  # of user code
        self.written_buffers: dict[str, set[int]] = {}  # by name: the stages that write the buffer
        # Modules and tensors used by functions recorded as a whole (a checkpoint), with their
        # stages.
        self.inside_functions: list[tuple[int, nn.Module | torch.Tensor]] = []
        self.reached: list[str] = []  # split points, in the order of their first calls
        self.inputs: dict[fx.Node, str] = {}  # placeholders: names of arguments
        self.reads_mode: set[str] = set()  # names of followed modules
        self.output: fx.Node | None = None
        self.followed = {path: model.get_submodule(path) for path in _above(split, inside)}
        self._model = model
        self._split = {module: name for name, module in split.items()}
        self._paths = {module: name for name, module in model.named_modules()}
        self._stage = 0
        self._devices = [*devices] or [_HOST]
        self._tensors: dict[int, RecordedValue] = {}  # parameters, buffers and constants, by id
        self._kept: list[object] = []  # objects whose ids are in use, kept alive
        self._inside: list[str] = []  # followed modules being called
        self._quiet = 0
        self._in_function = False
        self._thread = threading.get_ident()
        self._autocast = autocast()

    def run(self, arguments: Mapping[str, Any], call: Callable[[dict[str, Any]], Any]) -> None:
        """Trace a call of the model.

        Args:
            arguments: arguments of forward, by name.
            call: calls the model with arguments like these.

        Raises:
            CutError: forward contains code without a cut; with the line of the code.
        """
        given = {name: self._argument(name, value) for name, value in arguments.items()}
        attributes = ModuleAttributes(self.followed)
        try:
            with (
                noticing_draws(lambda: self.is_noting) as drawing,
                listening(self, self.followed.values()),
            ):
                returned = call(given)
            if drawing:
                why = f"{drawing[0]}: forward draws from Python's or NumPy's generator"
                raise CutError(why, "draw from torch's, or in a module that is not cut")
        except CutError:
            raise
        except Exception as error:
            where = line_of(error.__traceback__)
            if _is_from_compiler(error):
                why = f"{where}: forward cannot be followed: torch.compile made what it calls"
                fix = "leave torch.compile out, or take one device for a replica"
                raise CutError(why, fix) from error
            why = f"{where}: forward cannot be followed: {type(error).__name__}: {error}"
            raise CutError(why, self._instead()) from error
        finally:
            changed = attributes.restore()
        if changed:
            raise CutError(
                f"forward sets {changed[0]}, and a stage sets no attributes", self._instead()
            )
        self.output = self._rebuilt(returned)

    def forget(self) -> None:
        """Forget values and nodes: autograd's graphs would keep their origins alive for ever."""
        reached = self.reached
        vars(self).clear()
        self.reached = reached

    # -- methods called by recorded values, torch and modules
    # ---------------------------------------

    def function(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record and make a call of a function."""
        name = getattr(target, "__name__", "")
        if name in ("__get__", "__set__"):  # of a property of tensors
            name = getattr(target, "__self__").__name__  # noqa: B009
            if target.__name__ == "__set__":
                return self._noted("call_function", setattr, (args[0], name, args[1]), {})
            return self._noted("call_function", getattr, (args[0], name), {})
        with self._quietly():
            is_method = is_tensor_method_or_property(target)
        if is_method:
            return self.method(name, args, kwargs)
        return self._noted("call_function", target, args, kwargs)

    def method(self, name: str, args: Any, kwargs: Any) -> Any:
        """Record and make a call of a method of the first argument."""
        return self._noted("call_method", name, args, kwargs)

    def fixed(self, value: RecordedValue, how: Callable[[Any], Any]) -> Any:
        """Return ``how(value)``, and require the same result in every shard."""
        with self._quietly():
            wanted = how(value_of(value))
            self._check(value, how, wanted)
        return wanted

    def quiet(self, call: Callable[[], Any]) -> Any:
        """Call a function without recording."""
        with self._quietly():
            return call()

    def module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module: as a whole, or with its forward followed."""
        split = self._split.pop(module, None)
        if split is not None:
            self.reached.append(split)
            self._stage += 1
        path = self._paths.get(module)
        if path is None or module in self.followed.values():
            self._inside.append(path or type(module).__name__)
            result = call(*args, **kwargs)
            self._inside.pop()  # not after an error, which names this place
            return result
        before = {name: _written(buffer) for name, buffer in module.named_buffers()}
        result = self._noted("call_module", path, args, kwargs, call)
        for name, buffer in module.named_buffers():
            if before.get(name) != _written(buffer):
                self.written_buffers.setdefault(f"{path}.{name}", set()).add(self._stage)
        return result

    def inside(self, used: nn.Module | torch.Tensor) -> None:
        """Note a module or tensor used by a function that is recorded as a whole."""
        if self._in_function and threading.get_ident() == self._thread:
            self.inside_functions.append((self._stage, used))

    def attribute(self, tensor: torch.Tensor) -> RecordedValue:
        """Return the recorded value of a parameter or buffer, which every stage reads itself."""
        found = self._tensors.get(id(tensor))
        if found is None:
            named = (*self._model.named_parameters(), *self._model.named_buffers())
            name = next((name for name, own in named if own is tensor), None)
            kind, target = ("call_function", checks.held(tensor))
            if name is not None:
                kind, target = "get_attr", name  # type: ignore[assignment]
            found = self._tensors[id(tensor)] = self._free(kind, target, (), tensor)
            self._kept.append(tensor)
        return found

    def mode(self, module: nn.Module, training: bool) -> bool:
        """Note that forward read the mode of a module."""
        self.reads_mode.add(self._paths[module])
        return training

    @property
    def is_noting(self) -> bool:
        """True if the calling thread's calls are recorded now."""
        return not self._quiet and threading.get_ident() == self._thread

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    # -- nodes -----------------------------------------------------------------------------------

    def _noted(
        self,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        call: Callable[..., Any] | None = None,
    ) -> Any:
        """Make a call with the example's values, and add its node."""
        if self._quiet:
            why = f"{line_here()}: a function uses a value of forward that is not an argument"
            raise CutError(why, "pass all values that the function uses as arguments")
        if call is None:
            call = target if kind == "call_function" else _method(target)
        with self._quietly():
            return self._made(kind, target, args, kwargs, call)

    def _made(
        self, kind: str, target: Any, args: Any, kwargs: Any, call: Callable[..., Any]
    ) -> Any:
        read = [*recorded_in((args, kwargs))]
        before = [[_written(t) for t in nested.tensors(value_of(value))] for value in read]
        self._in_function = kind != "call_module"
        result = call(*self._of_host(target, args), **self._of_host(target, kwargs))
        result = self._of_stage(target, args, result)
        self._in_function = False
        has_tensors = any(True for _ in nested.tensors(result))
        if not read and not has_tensors and kind != "call_module":
            return result  # numbers and words, the same in every shard
        if autocast() != self._autocast or torch.is_inference_mode_enabled():
            why = f"{line_here()}: forward switches autocast or inference mode itself"
            raise CutError(why, self._instead())
        node = self._node(kind, target, self._lowered(args), self._lowered(kwargs))
        self.values[node] = result
        for value, versions in zip(read, before, strict=True):
            self._note_uses(node, value, versions)
        recorded = RecordedValue(self, node, result)
        if isinstance(result, _FIXED):
            if target not in _WRITES:
                self._check(recorded, _value, result)
            return result
        return recorded

    def _of_host(self, target: Any, given: Any) -> Any:
        """Return arguments with the example's values, which lie on the host."""
        given = mapped(given, value_of)
        if target is getattr or getattr(target, "__module__", "") == "_operator":
            return given  # such as a device's type, read from the stage's device
        kind = self._devices[0].type

        def hosts(name: object, value: Any) -> Any:
            is_device = isinstance(value, torch.device) or (
                isinstance(value, str) and (name == "device" or target == "to")
            )
            return _HOST if is_device and torch.device(value).type == kind else value

        if isinstance(given, dict):
            return {name: hosts(name, value) for name, value in given.items()}
        return [hosts(None, value) for value in given]

    def _of_stage(self, target: Any, args: Any, result: Any) -> Any:
        """Return a call's result; for a read of a tensor's device, the stage's device."""
        tensor = value_of(args[0]) if args and is_recorded(args[0]) else next(iter(args), None)
        device = self._devices[self._stage % len(self._devices)]
        if target is not getattr or not isinstance(tensor, torch.Tensor) or tensor.device != _HOST:
            return result
        told = {"device": device, "is_cpu": device == _HOST, f"is_{device.type}": True}
        return told.get(args[1], result)

    def _node(self, kind: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.create_node(kind, target, args, kwargs)
        self.stages[node] = self._stage
        self.lines[node] = line_here()
        if not torch.is_grad_enabled():
            self.without_grad.add(node)
        return node

    def _free(self, kind: str, target: Any, args: Any, value: Any) -> RecordedValue:
        node = self._node(kind, target, args, {})
        self.stages[node] = FREE
        self.without_grad.discard(node)
        self.values[node] = value
        return RecordedValue(self, node, value)

    def _check(self, value: RecordedValue, how: Callable[[Any], Any], wanted: object) -> None:
        call = checks.holds(how, wanted, line_here())
        self._node("call_function", call, (node_of(value),), {})

    def _argument(self, name: str, value: Any) -> Any:
        """Return an argument with recorded values instead of its tensors and numbers."""
        whole = self._free("placeholder", name, (), value)
        self.inputs[node_of(whole)] = name
        like = checks.arguments_like(name, checks.description(value))
        self._node("call_function", like, (node_of(whole),), {})

        def given(part: Any, path: tuple[Any, ...]) -> Any:
            found = inner(part)
            if found is not None:
                return made_of(part, {key: given(below, (*path, key)) for key, below in found})
            if isinstance(part, _FIXED):
                return part
            if not path:
                return whole
            return self._free("call_function", checks.leaf(path), (node_of(whole),), part)

        return given(value, ())

    def _lowered(self, value: Any) -> Any:
        """Return arguments in the form of nodes."""
        if is_recorded(value):
            return node_of(value)
        kind = type(value)
        if kind in (tuple, list):
            return kind([self._lowered(part) for part in value])
        if kind is dict and all(isinstance(key, str) for key in value):
            return {key: self._lowered(part) for key, part in value.items()}
        if kind is slice:
            return slice(*map(self._lowered, (value.start, value.stop, value.step)))
        if kind in _PLAIN or value is ...:
            return value
        if isinstance(value, torch.Tensor):
            return node_of(self.attribute(value))
        if any(True for _ in recorded_in(value)) or any(True for _ in nested.tensors(value)):
            return self._rebuilt(value)
        self._kept.append(value)
        return node_of(self._free("call_function", checks.held(value), (), value))

    def _rebuilt(self, value: Any) -> fx.Node:
        """Return a node to rebuild a nested value from the recorded values inside."""
        leaves = [*recorded_in(value)]
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        made = checks.rebuilt(builder(value, numbers))
        node = self._node("call_function", made, tuple(node_of(leaf) for leaf in leaves), {})
        self.values[node] = mapped(value, value_of)
        for leaf in leaves:
            self._note_uses(node, leaf, None)
        return node

    def _note_uses(self, node: fx.Node, value: RecordedValue, before: list[int] | None) -> None:
        for number, tensor in enumerate(nested.tensors(value_of(value))):
            if tensor.layout is torch.strided and (storage := tensor.untyped_storage().data_ptr()):
                known = () if before is None else before[number : number + 1]
                writes = any(earlier != _written(tensor) for earlier in known)
                self.uses.append(TensorUse(node, node_of(value), storage, writes))

    # -- errors ----------------------------------------------------------------------------------

    def _instead(self) -> str:
        inside = next((path for path in reversed(self._inside) if path in self.followed), "")
        if inside:
            return f"cut before {inside} or after it, not inside it"
        return "move that code into a module that is not cut"


def _is_from_compiler(error: BaseException) -> bool:
    """Return whether an error comes from torch's compiler, or from code below it."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    names = (str(frame.f_globals.get("__name__")) for frame in frames)
    return any(name.startswith("torch._dynamo") for name in names)


def _above(split: Mapping[str, nn.Module], inside: Sequence[str]) -> list[str]:
    """Return the names of the modules that contain split points; "" is the model."""
    found = {"": None, **dict.fromkeys(inside)}
    for name in split:
        words = name.split(".")
        found.update({".".join(words[:number]): None for number in range(1, len(words))})
    return [*found]


def _method(name: str) -> Callable[..., Any]:
    return lambda value, *args, **kwargs: getattr(value, name)(*args, **kwargs)


def _value(value: Any) -> Any:
    return value


def _written(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version(tensor)
