"""All uses of torch's private parts in the package, each under a name for the purpose.

A private part may disappear or change with any version of torch. So each is used only in this
module, a test checks the behaviour of each, and missing parts are detected when this module is
imported: one line per promise that does not hold, and no failure before the part is needed. No
promise needs the parts for faster float32 products, in ``kernels/onednn.py``.

Where torch has a public way in all supported versions, the public way is used instead:
``getattr(module, name)`` for a buffer, ``operator.name()`` for an operator's name,
``replica/nested.py`` for torch's pytree.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from enum import Enum
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.utils.parametrize  # torch does not import this by itself
import torch.utils.checkpoint

# A dispatch key that torch uses only in tests; a thread can enable the key.
STREAM_KEY = "TESTING_ONLY_GenericMode"

_torch: Any = torch  # private parts have no types, or types that change with the version
_C: Any = torch._C


class Promise(Enum):
    """A property based on private parts; the value is the message for a torch without them."""

    STREAMS = (
        "random numbers that models draw on the CPU are neither repeatable nor the same on any "
        "number of workers"
    )
    MUTABLE_FROZEN = (
        "statistics that a model keeps in frozen parameters (Keras) are not carried from step to "
        "step"
    )
    GRADIENT_HOOKS = "hooks on a model's parameters are not refused, and work on one device only"
    OPERATORS = "soft placement, placement logs and quorate verify see no operators"
    BACKWARD = "placement logs and quorate verify do not know operators of the backward pass"
    COMPOSITE = "soft placement may run an operator twice that writes to what it was given"
    VIEWS = "quorate verify does not follow what is written to a part of a tensor"
    GENERATORS = "quorate verify takes the shard's own generator for a foreign one"
    SPREAD = "a model cannot be spread over devices"
    NORMS = "batch normalisation that is not torch's own computes in bf16 and fp16 with the rest"
    COMPILE = "compile=True does not work"
    TRACED = "models that call torch.compile themselves, and draw random numbers, do not work"


# Names are relative to torch, or to an example of the named kind.
_EXAMPLES: Mapping[str, Callable[[], object]] = {
    "torch": lambda: torch,
    "tensor": lambda: torch.empty(0),
    "generator": torch.Generator,
    "node": lambda: torch.ones(1, requires_grad=True).exp().grad_fn,
    "module": torch.nn.Module,
    "operator": lambda: _torch.ops.aten.relu.default,
}
_OF_KEYS = (
    "_parse_dispatch_key _dispatch_library _dispatch_has_backend_fallback DispatchKeySet "
    "_IncludeDispatchKeyGuard _ExcludeDispatchKeyGuard _ForceDispatchKeyGuard "
    "_dispatch_tls_local_include_set _dispatch_tls_local_exclude_set"
)
_PARTS: Mapping[Promise, Sequence[str]] = {
    Promise.STREAMS: (
        *(f"torch._C.{name}" for name in _OF_KEYS.split()),
        "torch.library.fallthrough_kernel",
        "torch.random.default_generator",
    ),
    Promise.MUTABLE_FROZEN: ("tensor._version",),
    Promise.GRADIENT_HOOKS: ("tensor._backward_hooks", "tensor._post_accumulate_grad_hooks"),
    Promise.OPERATORS: (
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch._C._dispatch_get_all_op_names",
        "operator._schema",
    ),
    Promise.BACKWARD: (
        "torch._C._current_autograd_node",
        "torch.autograd._get_sequence_nr",
        "node._sequence_nr",
    ),
    Promise.COMPOSITE: (
        "torch._C._dispatch_key_for_device",
        "torch._C._dispatch_has_computed_kernel_for_dispatch_key",
    ),
    Promise.VIEWS: ("tensor._base",),
    Promise.GENERATORS: ("generator._cdata",),
    Promise.SPREAD: ("module._apply",),
    Promise.NORMS: ("torch.nn.modules.batchnorm._NormBase",),
    Promise.TRACED: ("torch._C._get_dispatch_mode", "torch._C._TorchDispatchModeKey"),
}
# Importing these takes a second, so only their presence is checked. Relative to torch's folder.
_COMPILER_FILES = ("_dynamo/config.py", "_inductor/config.py", "_inductor/compile_fx.py")


def _lacking(promise: Promise) -> list[str]:
    """Return the names of the parts that this torch lacks."""
    if promise is Promise.COMPILE:
        folder = Path(torch.__file__ or "").parent
        return [f"torch/{file}" for file in _COMPILER_FILES if not (folder / file).exists()]
    names = []
    for name in _PARTS[promise]:
        example, _, path = name.partition(".")
        try:
            attrgetter(path)(_EXAMPLES[example]())
        except AttributeError:
            names.append(name)
    return names


LACKING = {promise: names for promise in Promise if (names := _lacking(promise))}
for _promise, _names in LACKING.items():
    logging.getLogger("quorate").warning(
        f"quorate: torch {torch.__version__} has no {', '.join(_names)}: {_promise.value}"
    )


def holds(promise: Promise) -> bool:
    """Return whether this torch has the parts for a promise."""
    return promise not in LACKING


# --- random streams -----------------------------------------------------------------------------
# No public way gives a thread a default generator: torch has one per process and device.
_has_streams = holds(Promise.STREAMS)


def intercepted() -> AbstractContextManager[object]:
    """Return a context in which this thread's operators look for a kernel of ``STREAM_KEY``."""
    if not _has_streams:
        return nullcontext()
    guard: AbstractContextManager[object] = _C._IncludeDispatchKeyGuard(_stream_key()[0])
    return guard


def intercepted_anyway() -> AbstractContextManager[object]:
    """Return a context with the same effect where ``STREAM_KEY`` is disabled.

    torch disables passed keys in calls of a ``TorchDispatchMode``.
    """
    if not _has_streams:
        return nullcontext()
    key, *_ = _stream_key()
    include = _C._dispatch_tls_local_include_set().add(key)
    exclude = _C._dispatch_tls_local_exclude_set().remove(key)
    guard: AbstractContextManager[object] = _C._ForceDispatchKeyGuard(include, exclude)
    return guard


def passed_on() -> AbstractContextManager[object]:
    """Return a context for a kernel of ``STREAM_KEY`` that calls its own operator.

    Without the context, the call would return to the kernel for ever.
    """
    if not _has_streams:
        return nullcontext()
    guard: AbstractContextManager[object] = _C._ExcludeDispatchKeyGuard(_stream_key()[1])
    return guard


@cache
def _stream_key() -> tuple[Any, Any, Any]:
    """Return the key, and a set with the key; operators without a kernel for the key fall through.

    The fallthrough costs nothing; ``PreDispatch``, which calls each operator again, would cost a
    sixth of a small shard.
    """
    key, library = _C._parse_dispatch_key(STREAM_KEY), None
    if not _C._dispatch_has_backend_fallback(key):
        # Not ``torch.library.Library``: torch destroys those at exit, where threads may still
        # compute.
        library = _C._dispatch_library("IMPL", "_", "", __file__, 0)
        library.fallback(STREAM_KEY, torch.library.fallthrough_kernel, False)
        # Operators with function arguments (torch.cond, compiler output) ignore fallbacks: they
        # skip a key if it is in a list when they are made.
        ops: Any = torch._ops
        passed_over = getattr(ops, "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS", [])
        passed_over.append(key)
        for operator in getattr(ops, "_higher_order_ops", {}).values():
            operator.fallthrough(key)
    return key, _C.DispatchKeySet(key), library  # the fallback lives as long as the library


def replace_default_generator(stand_in: Callable[[torch.Generator], object]) -> None:
    """Replace the CPU's default generator by ``stand_in(generator)``.

    ``torch.manual_seed``, ``get_rng_state`` and ``fork_rng`` look the generator up there. C++ has
    another reference, which stays unchanged.
    """
    random: Any = torch.random
    random.default_generator = stand_in(random.default_generator)


def is_same_generator(one: torch.Generator, other: torch.Generator) -> bool:
    """Return whether two objects refer to the same generator.

    An operator's argument is a new Python object each time, and ``torch.Generator`` has no
    comparison: only the address in C++ tells.
    """
    if not holds(Promise.GENERATORS):
        return one is other
    both: tuple[Any, Any] = one, other
    return bool(both[0]._cdata == both[1]._cdata)


def is_traced() -> bool:
    """Return whether this thread's operators are recorded, for example by torch's compiler.

    All tracers of torch put one of three modes on the thread's stack. A generator argument of an
    operator would enter the recorded graph, and compilers refuse such a graph.
    """
    return any(_mode_of(key) is not None for key in _tracers)


_tracers: tuple[Any, ...] = ()
if holds(Promise.TRACED):
    _mode_of = _C._get_dispatch_mode
    _keys = _C._TorchDispatchModeKey
    _tracers = (_keys.FAKE, _keys.PROXY, _keys.FUNCTIONAL)


# --- tensors, parameters and optimizers ---------------------------------------------------------


def version(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to a tensor; zero if unknown.

    Autograd counts writes for its own use. A comparison of values would need a copy, and would miss
    a write of equal values.
    """
    return tensor._version if _counts_writes else 0


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return ``version`` of many tensors, without a Python call for each, for every shard."""
    return list(map(_version_of, tensors)) if _counts_writes else []


_version_of = attrgetter("_version")
_counts_writes = holds(Promise.MUTABLE_FROZEN)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a script has put hooks on a parameter; there is no public way."""
    if not holds(Promise.GRADIENT_HOOKS):
        return False
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the base tensor of a view; None if the tensor is no view, or torch does not know."""
    return tensor._base if holds(Promise.VIEWS) else None


def copy_all(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool = False
) -> None:
    """Copy tensors to as many targets, on a GPU with a single kernel.

    Among torch's functions for lists of tensors, only ``copy`` is undocumented. Without this
    function, tensors are copied in a loop, in more time.
    """
    if (together := getattr(torch, "_foreach_copy_", None)) is not None:
        together(targets, sources, non_blocking=non_blocking)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


_optim = vars(sys.modules[torch.optim.Optimizer.__module__])  # torch.optim deletes its name
_OWN_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_ALL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether user code hooks into the steps of an optimizer, or of all optimizers."""
    return any(map(vars(optimizer).get, _OWN_HOOKS)) or any(map(_optim.get, _ALL_HOOKS))


def is_profiled() -> bool:
    """Return whether a profiler observes this thread: True if torch does not tell."""
    ask = getattr(torch.autograd, "_profiler_enabled", None)
    return ask is None or ask()


# --- modules ------------------------------------------------------------------------------------


def buffers_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return a module's own buffers by name, a live mapping.

    An attribute would be looked up in four places before: 1 us, per buffer and shard.
    """
    return module._buffers


def parameters_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return a module's own parameters by name, a live mapping."""
    return module._parameters


def parts_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return a module's direct submodules by name."""
    return module._modules


def replace_tensors(
    model: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Replace each parameter, gradient and buffer by ``function(tensor)``, in place.

    ``model.to(device)`` works in this way, but moves all tensors to a single device. Modules
    override the method: recurrent layers must lay their weights out in a single piece again.
    """
    model._apply(function)  # type: ignore[no-untyped-call]


# Batch and instance normalisation of any dimension. Their common class has no public name, and
# classes of other packages (Apex, mmcv) are subclasses of the common class and not of a public one.
NORM_BASES: tuple[type[torch.nn.Module], ...] = (
    *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm),
    *(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d),
)
if holds(Promise.NORMS):
    NORM_BASES = (_torch.nn.modules.batchnorm._NormBase,)


def parametrizations_are_cached() -> int:
    """Return the number of active ``parametrize.cached()`` blocks: one cache for the process."""
    return int(getattr(_torch.nn.utils.parametrize, "_cache_enabled", 0))


def cache_parametrizations(blocks: int) -> None:
    """Set the number of such blocks, with an empty cache."""
    parametrize: Any = _torch.nn.utils.parametrize
    parametrize._cache_enabled, parametrize._cache = blocks, {}


# --- operators ----------------------------------------------------------------------------------
# torch's documentation shows TorchDispatchMode (notes on extending PyTorch), but imports it from a
# private place too: there is no other.

_one_at_a_time = threading.Lock()


@cache
def _make_operators() -> None:
    """Make the Python objects of all operators. The first call takes 0.2 s.

    torch makes an operator's object at its first call under a mode. Two threads in their first
    shards may make two: torch keeps a bare pointer to one, ``torch.ops`` replaces it by the other
    and frees the first, and the next call of the operator ends the process with signal 11.
    """
    for name in _C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        getattr(attrgetter(f"{namespace}.{packet}")(_torch.ops), overload or "default")


if TYPE_CHECKING or holds(Promise.OPERATORS):
    from torch.utils._python_dispatch import TorchDispatchMode

    class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """A ``TorchDispatchMode`` for several threads, which does not import torch's compiler.

        torch wraps ``__torch_dispatch__`` to protect the mode from compilation around it. The
        wrapper imports ``torch._dynamo`` at the first call: 1.6 to 4.6 s in each worker process. So
        the wrapper is bypassed until the module is imported for another reason. A torch with a
        different wrapper may take this time again, without further effects:
        ``test_a_mode_makes_no_operator_and_does_not_import_the_compiler`` notices.
        """

        def __enter__(self) -> Any:
            with _one_at_a_time:
                _make_operators()
            return super().__enter__()  # type: ignore[no-untyped-call]

        def __init_subclass__(cls, **options: Any) -> None:
            written = vars(cls).get("__torch_dispatch__")
            super().__init_subclass__(**options)  # type: ignore[no-untyped-call]
            wrapped = vars(cls).get("__torch_dispatch__")
            if written is None or wrapped is None or written is wrapped:
                return

            def dispatch(*args: Any, **keywords: Any) -> Any:
                is_imported = "torch._dynamo" in sys.modules
                return (wrapped if is_imported else written)(*args, **keywords)

            if never_compile(dispatch.__code__):  # otherwise the compiler would try this function
                setattr(cls, "__torch_dispatch__", dispatch)  # noqa: B010

else:

    class OperatorMode:
        """A substitute that cannot be entered, for a torch without ``TorchDispatchMode``."""

        def __enter__(self) -> Any:
            raise RuntimeError(f"torch {torch.__version__}: {Promise.OPERATORS.value}")

        def __exit__(self, *_: object) -> None:
            pass


def schema_arguments(operator: Any) -> Sequence[Any]:
    """Return the arguments in an operator's schema: name, keyword, written or not."""
    arguments: Sequence[Any] = operator._schema.arguments
    return arguments


def is_composite(operator: Any, device: torch.device) -> bool:
    """Return whether an operator has a composed kernel for a device.

    The operator's ``has_kernel_for_dispatch_key`` counts only its own kernels.
    """
    if not holds(Promise.COMPOSITE):
        return False
    key = _C._dispatch_key_for_device(device.type)
    return bool(_C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), key))


# --- backward -----------------------------------------------------------------------------------
# A forward call and the derivative share a number, known to autograd only.


def current_backward_call() -> int | None:
    """Return the number of the forward call whose derivative this thread computes now, or None."""
    if not holds(Promise.BACKWARD):
        return None
    node = _C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def last_forward_call() -> int:
    """Return the number of this thread's latest call that autograd may derive."""
    if not holds(Promise.BACKWARD):
        return 0
    return int(_torch.autograd._get_sequence_nr()) - 1


# --- groups of ranks ----------------------------------------------------------------------------
# torch.distributed makes device objects for registered groups only.


def new_backend(
    device_type: str,
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    address: str | None = None,
) -> Any:
    """Return the backend of torch.distributed for a kind of device and a group of ranks. Blocks.

    Args:
        address: address of this host on which gloo listens; None: torch's choice.

    Raises:
        ValueError: torch has no backend for this kind of device.
    """
    dist: Any = torch.distributed
    name = backend_name(device_type)
    if name == "gloo" and address is not None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return dist.ProcessGroupGloo(store, rank, size, options)
    if name in _BUILT_IN:
        make = getattr(dist, _BUILT_IN[name])
        return make(store, rank, size, timeout=timeout)
    plugin = dist.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = _C._distributed_c10d._DistributedBackendOptions()
    options.store, options.timeout, options.group_id = store, timeout, ""
    options.group_rank, options.group_size = rank, size
    options.global_ranks_in_group = []  # all ranks
    return plugin.creator_fn(options, None)


def backend_name(device_type: str) -> str:
    """Return the name of the backend for a kind of device: of torch, or of a plug-in.

    Raises:
        ValueError: there is no backend.
    """
    dist: Any = torch.distributed
    name = str(dist.get_default_backend_for_device(device_type))
    is_there = hasattr(dist, _BUILT_IN.get(name, "")) or name.upper() in dist.Backend._plugins
    # torch names gloo for MPS too, whose memory gloo does not read.
    if not is_there or (name == "gloo") != (device_type == "cpu"):
        raise ValueError(f"torch {torch.__version__} has no collectives for {device_type!r}")
    return name


_BUILT_IN = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}


def sent_together(
    backend: Any, calls: Sequence[tuple[Callable[..., Any], list[torch.Tensor], int]]
) -> list[Any]:
    """Begin several sends and receives of a backend of torch.distributed; return their works.

    NCCL needs them in a single call: two ranks would wait for each other if both began with a send.
    ``torch.distributed.batch_isend_irecv`` does the same, but only for a registered group.

    Args:
        calls: ``backend.send`` or ``backend.recv``, with a list of a single tensor and the peer's
            rank.
    """
    if not backend.supports_coalescing:
        return [call(tensors, rank, 0) for call, tensors, rank in calls]
    backend._start_coalescing()
    for call, tensors, rank in calls:
        call(tensors, rank, 0)
    work = backend._end_coalescing()
    return [] if work is None else [work]


# --- the compiler -------------------------------------------------------------------------------
# torch.compile takes options for inductor, but gives no notice of a compilation; a custom backend
# is notified, and can call inductor only by this name.


def run_inductor(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, object]
) -> Any:
    """Compile a graph with torch's default backend, under options of ``torch.compile``."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, config_patches=dict(options))


@contextmanager
def checkpoint_body(other: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let ``torch.utils.checkpoint.checkpoint`` call a replacement inside the block.

    Scripts import ``checkpoint`` by name, so replacing ``checkpoint`` in the module would have no
    effect. torch wraps functions that must not be compiled, and keeps the wrapped function as an
    attribute of the inner function. Without this attribute, models with checkpoints are not cut.

    Args:
        other: receives the function wrapped by ``checkpoint``, and returns a replacement.
    """
    body: Any = inspect.unwrap(torch.utils.checkpoint.checkpoint)
    name, none = "__dynamo_disable", object()
    before = getattr(body, name, none)
    setattr(body, name, other(body))
    try:
        yield
    finally:
        if before is none:
            delattr(body, name)
        else:
            setattr(body, name, before)


@contextmanager
def strict_compiler() -> Iterator[None]:
    """Turn failures to compile into errors inside the block; the settings are the thread's.

    ``torch.compile`` has no argument for the limits in torch 2.10 (``recompile_limit`` is younger).
    """
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    with ExitStack() as stack:
        limits = dynamo.patch(
            # Past the limit, torch would go on without compiling: bits would depend on the order of
            # shapes. Replicas share the limit, so it is above all of theirs.
            fail_on_recompile_limit_hit=True,
            recompile_limit=4096,
            accumulated_recompile_limit=4096,
        )
        stack.enter_context(limits)
        # No processes that outlive the training; they start when inductor is imported.
        stack.enter_context(inductor.patch(compile_threads=1))
        yield


@contextmanager
def repeatable_compiler() -> Iterator[None]:
    """Let ``torch.compile`` in user code make the same code in every worker inside the block.

    The code for a shape must depend neither on earlier shapes (dynamic shapes) nor on measurements,
    and random numbers are drawn by the operators of uncompiled code. Options that user code passes
    to ``torch.compile`` take precedence.
    """
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    with (
        strict_compiler(),
        dynamo.patch(automatic_dynamic_shapes=False),
        inductor.patch(fallback_random=True, deterministic=True),
    ):
        yield


def never_compile(code: CodeType) -> bool:
    """Let torch's compiler run a function, and all functions called inside, as written.

    ``torch._dynamo.disable`` does the same, but has to be imported. If torch ignores the mark,
    watchers of operators are compiled: ``test_the_compiler_leaves_a_mode_alone`` notices.

    Returns:
        Whether the mark is set; False for a torch without such a mark.
    """
    compiler: Any = getattr(_C, "_dynamo", None)  # the part in C++, which torch itself imports
    try:
        part = compiler.eval_frame
        skip = part._FrameAction.SKIP
        part.set_code_exec_strategy(code, part._FrameExecStrategy(skip, skip))
    except AttributeError:
        return False
    return True


def compiler_is_in_use() -> bool:
    """Return whether this process has ever called ``torch.compile``.

    torch's compiler lists the backends requested so far. The compiler is imported for other
    purposes too, for example by optimizers; without the list, the import counts.
    """
    module: Any = sys.modules.get("torch._dynamo.eval_frame")
    if module is None:
        return False
    try:
        return any(map(callable, module.cached_backends.values()))
    except AttributeError:
        return True


def may_compiler_measure() -> bool:
    """Return whether torch's compiler may choose kernels by measured times; True if not loaded."""
    config: Any = sys.modules.get("torch._inductor.config")
    return config is None or not config.deterministic


def let_compiler_measure(may_measure: bool) -> None:
    """Set whether torch's compiler may choose kernels by measured times.

    ``torch.use_deterministic_algorithms`` does the same, and fails while the interpreter ends.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    if config is None and not may_measure:
        from torch._inductor import config
    if config is not None:
        config.deterministic = not may_measure


def tell_compilations(started: Callable[[object], None]) -> None:
    """Call ``started`` whenever torch's compiler begins, in the compiling thread.

    May be called again: ``torch._dynamo.reset()`` drops the callback. An error raised by
    ``started`` leaves the call that was to be compiled.
    """
    dynamo: Any = sys.modules["torch._dynamo"]
    if started not in dynamo.callback_handler.start_callbacks:
        dynamo.on_compile_start(started)


def compiled_original(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the original of a module made by ``torch.compile``; None for all other modules."""
    if not hasattr(type(model), "_opt_mod_attributes"):
        return None
    original = parts_of(model).get("_orig_mod")
    return original if isinstance(original, torch.nn.Module) else None


def compiled_function(function: Any) -> Any:
    """Return the original of a function made by ``torch.compile``; None for all other functions."""
    return getattr(function, "_torchdynamo_orig_callable", None)


def compiler_of(compiled: torch.nn.Module) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Return ``torch.compile`` with the arguments that made a compiled module."""
    context: Callable[[torch.nn.Module], torch.nn.Module] = getattr(compiled, "dynamo_ctx")  # noqa: B009
    return context


def is_call_compiled(module: torch.nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def compile_call_as(module: torch.nn.Module, copied: torch.nn.Module) -> bool:
    """Compile a copy's call as ``module.compile()`` did: ``copy.deepcopy`` omits this.

    Returns:
        Whether this is done; False if torch does not tell the arguments of ``compile()``.
    """
    call: Any = module._compiled_call_impl
    if call is None:
        return True
    cells = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=False))
    if "self" not in cells or not callable(cells["self"].cell_contents):
        return False
    copied._compiled_call_impl = cells["self"].cell_contents(copied._call_impl)
    return True


# --- the processor ------------------------------------------------------------------------------


def cpu_has_bfloat16() -> bool:
    """Return whether an x86 processor has instructions for products of bfloat16."""
    cpu: Any = torch.cpu
    if hasattr(cpu, "get_capabilities"):  # public; not in torch 2.10
        can = cpu.get_capabilities()
        return bool(can.get("avx512_bf16") or can.get("amx_tile"))
    asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(hasattr(cpu, name) and getattr(cpu, name)() for name in asks)
