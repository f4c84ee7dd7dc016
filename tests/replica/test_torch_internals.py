"""What we use of torch's private parts does what it is used for, in the torch that is installed.

And a torch that lacks a part is named at import, with the promise that then does not hold.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
import torch
from torch import nn

from quorate.replica import torch_internals as internals
from quorate.replica.torch_internals import Promise

HAS_COMPILER = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))

# --- a torch that has all of it, and one that lacks something -------------------------------------


def test_this_torch_has_all_of_it() -> None:
    assert internals.LACKING == {}
    assert all(internals.holds(promise) for promise in Promise)


# How to make a torch that lacks what a promise is made of.
TAKEN_AWAY = {
    Promise.STREAMS: "del torch._C._IncludeDispatchKeyGuard",
    Promise.MUTABLE_FROZEN: "torch.Tensor._version = property(lack)",
    Promise.GRADIENT_HOOKS: "torch.Tensor._post_accumulate_grad_hooks = property(lack)",
    Promise.OPERATORS: "del torch.utils._python_dispatch.TorchDispatchMode",
    Promise.BACKWARD: "del torch._C._current_autograd_node",
    Promise.COMPOSITE: "del torch._C._dispatch_key_for_device",
    Promise.VIEWS: "torch.Tensor._base = property(lack)",
    Promise.GENERATORS: "torch.Generator = type('Generator', (), {})",
    Promise.SPREAD: "del torch.nn.Module._apply",
    Promise.NORMS: "del torch.nn.modules.batchnorm._NormBase",
    Promise.COMPILE: "torch.__file__ = '/nowhere/torch/__init__.py'",
    Promise.TRACED: "del torch._C._get_dispatch_mode",
}


# What it must still be possible to do then.
USED_WITHOUT = {
    Promise.STREAMS: """
        from quorate.replica.streams import Stream
        with Stream() as stream:
            stream.reseed(1)
            torch.rand(3)
            with stream.lent():
                torch.rand(3)
        """,
    Promise.MUTABLE_FROZEN: "assert internals.version(torch.zeros(1).add_(1)) == 0",
    Promise.GRADIENT_HOOKS: "assert not internals.has_gradient_hooks(torch.zeros(1))",
    Promise.OPERATORS: """
        from quorate.replica.placement.log import PlacementLog
        try:
            with PlacementLog(torch.nn.Linear(1, 1)):
                pass
        except RuntimeError as error:
            assert "see no operators" in str(error)
        else:
            raise AssertionError
        """,
    Promise.BACKWARD: """
        assert internals.current_backward_call() is None
        assert internals.last_forward_call() == 0
        """,
    Promise.COMPOSITE: """
        assert not internals.is_composite(torch.ops.aten.relu.default, torch.device("cpu"))
        """,
    Promise.VIEWS: "assert internals.base_of(torch.zeros(2)[:1]) is None",
    Promise.NORMS: "assert isinstance(torch.nn.BatchNorm2d(1), internals.NORM_BASES)",
    Promise.TRACED: "assert not internals.is_traced()",
}


# A process that imports torch once; each torch that lacks something is in a process forked from it.
FORKS = """
import json, os, sys, tempfile, traceback
import torch

def lack(self):
    raise AttributeError

def child(log, take_away, use):
    os.dup2(log.fileno(), 2)
    try:
        exec(take_away, globals())
        exec("from quorate.replica import torch_internals as internals", globals())
        exec(use, globals())
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

logged = {}
for name, (take_away, use) in json.loads(sys.argv[1]).items():
    with tempfile.TemporaryFile("w+") as log:
        if (pid := os.fork()) == 0:
            child(log, take_away, use)
        _, status = os.waitpid(pid, 0)
        log.seek(0)
        logged[name] = status, log.read()
print(json.dumps(logged))
"""


@pytest.fixture(scope="module")
def logged() -> dict[str, tuple[int, str]]:
    """For each promise how it ended, and what was on stderr, where torch lacks its parts."""
    cases = {
        promise.name: (
            TAKEN_AWAY[promise],
            f"assert not internals.holds(internals.Promise.{promise.name})\n"
            + textwrap.dedent(USED_WITHOUT.get(promise, "")),
        )
        for promise in Promise
    }
    command = [sys.executable, "-c", FORKS, json.dumps(cases)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, tuple[int, str]] = json.loads(ended.stdout)
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("promise", Promise, ids=lambda promise: promise.name)
def test_a_torch_without_it_is_named_in_one_line_and_the_rest_works(
    promise: Promise, logged: dict[str, tuple[int, str]]
) -> None:
    status, said = logged[promise.name]
    assert status == 0, said
    assert said.startswith(f"quorate: torch {torch.__version__} has no ")
    assert said.endswith(f": {promise.value}\n")
    assert said.count("\n") == 1


def test_without_a_copy_for_lists_it_is_done_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [torch.arange(3.0), torch.ones(2, 2, dtype=torch.float64)]
    together = [torch.zeros(3), torch.zeros(2, 2)]
    internals.copy_all(together, sources)
    monkeypatch.delattr(torch, "_foreach_copy_")
    apart = [torch.zeros(3), torch.zeros(2, 2)]
    internals.copy_all(apart, sources)
    for mine, theirs, source in zip(together, apart, sources, strict=True):
        assert torch.equal(mine, source.float())
        assert torch.equal(mine, theirs)


# --- what each is used for ------------------------------------------------------------------------


def test_an_operator_without_a_kernel_for_the_key_falls_through_to_the_next() -> None:
    with internals.intercepted():
        assert torch.ones(1).add(1).item() == 2
    table = torch._C._dispatch_dump_table("aten::add.Tensor")  # type: ignore[attr-defined]
    entries = [line for line in table.splitlines() if line.startswith(internals.STREAM_KEY)]
    assert len(entries) == 1
    assert entries[0].startswith(f"{internals.STREAM_KEY}: fallthrough")


def test_operators_of_a_thread_are_intercepted_by_it_alone() -> None:
    calls: list[int] = []
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def kernel(x: torch.Tensor) -> torch.Tensor:
        calls.append(threading.get_ident())
        with internals.passed_on():
            return torch.ops.aten.erfinv(x)

    library.impl("erfinv", kernel, internals.STREAM_KEY)
    try:
        x = torch.tensor([0.5])
        x.erfinv()
        assert calls == []
        with internals.intercepted():
            x.erfinv()
            other = threading.Thread(target=x.erfinv)
            other.start()
            other.join()
        assert calls == [threading.get_ident()]
        x.erfinv()
        assert len(calls) == 1
        with internals.intercepted_anyway():
            x.erfinv()
        assert len(calls) == 2
        with internals.intercepted(), internals.passed_on():
            x.erfinv()
            assert len(calls) == 2
            with internals.intercepted_anyway():
                x.erfinv()
        assert len(calls) == 3
    finally:
        library._destroy()


def test_the_default_generator_of_python_is_replaced() -> None:
    before: Any = torch.random.default_generator
    other = torch.Generator()
    internals.replace_default_generator(lambda _: other)
    try:
        torch.manual_seed(5)
        assert other.initial_seed() == 5
        assert torch.equal(torch.get_rng_state(), other.get_state())
    finally:
        internals.replace_default_generator(lambda _: before)
    assert torch.random.default_generator is before


def test_a_generator_is_known_by_what_it_stands_for() -> None:
    generator, seen = torch.Generator(), []

    class Look(internals.OperatorMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append((kwargs or {}).get("generator"))
            return func(*args, **kwargs)

    with Look():
        torch.empty(3).normal_(generator=generator)
    assert internals.is_same_generator(seen[-1], generator)
    assert not internals.is_same_generator(seen[-1], torch.Generator())


def test_writes_are_counted_whatever_they_write() -> None:
    tensor = torch.zeros(3)
    before = internals.version(tensor)
    tensor.clone()
    assert internals.version(tensor) == before
    tensor.zero_()
    assert internals.version(tensor) > before


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_parameter_are_seen(kind: str) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert not internals.has_gradient_hooks(parameter)
    getattr(parameter, kind)(lambda _: None)
    assert internals.has_gradient_hooks(parameter)


def test_a_view_has_a_base() -> None:
    whole = torch.zeros(4)
    assert internals.base_of(whole) is None
    assert internals.base_of(whole[1:]) is whole


def test_tensors_of_a_model_are_replaced_in_place() -> None:
    model = nn.Sequential(nn.LSTM(3, 3), nn.BatchNorm1d(3))
    parameters, plain = list(model.parameters()), copy.deepcopy(model)
    internals.replace_tensors(model, lambda tensor: tensor + 1)
    assert all(mine is theirs for mine, theirs in zip(parameters, model.parameters(), strict=True))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor + 1)


def test_the_bases_of_norms_are_those_of_torch_and_of_others() -> None:
    class Own(nn.modules.batchnorm._BatchNorm):
        pass

    for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm2d, Own):
        assert isinstance(kind(2), internals.NORM_BASES)
    assert not isinstance(nn.LayerNorm(2), internals.NORM_BASES)


def test_a_schema_says_which_argument_is_written() -> None:
    arguments = internals.schema_arguments(torch.ops.aten.add.out)
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["out"]
    assert [a.name for a in arguments if a.kwarg_only] == ["alpha", "out"]


def test_an_operator_has_its_name_without_private_parts() -> None:
    operator: Any = torch.ops.aten.add.Tensor
    assert operator.name() == "aten::add.Tensor"
    assert torch.ops.aten.relu.default.name() == "aten::relu"


def test_kernels_that_are_made_of_others() -> None:
    cpu = torch.device("cpu")
    assert internals.is_composite(torch.ops.aten.matmul.default, cpu)
    assert not internals.is_composite(
        torch.ops.aten._standard_gamma_grad.default, torch.device("mps")
    )


def test_a_call_and_its_derivative_have_one_number() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    forward = internals.last_forward_call()
    z = y.exp()
    assert internals.last_forward_call() == forward + 1
    assert internals.current_backward_call() is None
    seen: list[int | None] = []
    y.grad_fn.register_prehook(lambda _: seen.append(internals.current_backward_call()))
    z.sum().backward()
    assert seen == [forward]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler, which torch.compile needs on CPUs")
@pytest.mark.filterwarnings("ignore")  # of torch's own modules, when the compiler imports them
def test_inductor_compiles_under_options() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return internals.run_inductor(graph, inputs, {"compile_threads": 1})

    compiled: list[torch.fx.GraphModule] = []
    function = torch.compile(lambda x: x.sin() + 1, backend=backend, dynamic=False)
    x = torch.linspace(0, 1, 8)
    with internals.strict_compiler():
        from torch._dynamo import config

        assert config.fail_on_recompile_limit_hit
        assert config.recompile_limit == 4096
        assert torch.allclose(function(x), x.sin() + 1)
    assert len(compiled) == 1


TRACED = """
import sys
import torch
from quorate.replica.placement import fallback, log
from quorate.replica.torch_internals import OperatorMode
from quorate.replica.witness import data_writes, operator_trace

model = torch.nn.Linear(3, 2)
with log.PlacementLog(model) as placed, data_writes.WriteWatch({}):
    model(torch.randn(4, 3)).clone().sum().backward()
assert "addmm" in placed.table()
assert len(OperatorMode.__subclasses__()) == 4
assert "torch._dynamo" not in sys.modules
"""


def test_a_mode_does_not_import_the_compiler() -> None:
    """Each worker process would import it at the first shard of ``quorate verify``."""
    command = [sys.executable, "-c", TRACED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.filterwarnings("ignore")  # of torch's own modules, when the compiler imports them
def test_the_compiler_leaves_a_mode_alone() -> None:
    """Within a mode nothing is compiled, but what a mode calls is, unless torch is told."""

    class Look(internals.OperatorMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(look(args[0]))
            return func(*args, **(kwargs or {}))

    def look(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone() * 2 + 1

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    seen: list[torch.Tensor] = []
    compiled: list[torch.fx.GraphModule] = []
    function = torch.compile(lambda x: x.sin() + 1, backend=backend)
    x = torch.ones(3)
    with Look():
        function(x)
    assert len(seen) == 2
    assert compiled == []
    torch._dynamo.reset()


def test_what_the_processor_can() -> None:
    assert internals.cpu_has_bfloat16() in (True, False)
