"""Used private parts of torch serve their purpose, in the installed torch.

And a torch without a part is named at import, with the promise broken by the lack.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from quorate.replica import torch_internals as internals
from quorate.replica.torch_internals import Promise

# --- a torch with all parts, and torches without a part -------------------------------------------


# How to make a torch without the base of a promise.
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


# Actions that must still be possible then.
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


# A process that imports torch once; each torch with a lack is in a process forked from it.
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

# Two threads that make an operator at the same time end the process, seldom: see the function.
MODE = """
    from quorate.replica.placement.log import PlacementLog
    with PlacementLog(torch.nn.Linear(1, 1)):
        torch._ops.OpOverload.__init__ = lack
        torch._foreach_copy_([torch.zeros(1)], [torch.ones(1)])
    assert "torch._dynamo" not in sys.modules
    """


@pytest.fixture(scope="module")
def logged() -> dict[str, tuple[int, str]]:
    """Return the end and stderr of a process for each promise, with a torch without the parts."""
    cases = {
        promise.name: (
            TAKEN_AWAY[promise],
            f"assert not internals.holds(internals.Promise.{promise.name})\n"
            + textwrap.dedent(USED_WITHOUT.get(promise, "")),
        )
        for promise in Promise
    }
    cases["mode"] = "", textwrap.dedent(MODE)
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_mode_makes_no_operator_and_does_not_import_the_compiler(
    logged: dict[str, tuple[int, str]],
) -> None:
    status, said = logged["mode"]
    assert status == 0, said


def test_what_no_feature_shows_at_once() -> None:
    tensor = torch.zeros(3)
    before = internals.version(tensor)
    tensor.clone()
    assert internals.version(tensor) == before
    tensor.zero_()
    assert internals.version(tensor) > before
    aten, cpu = torch.ops.aten, torch.device("cpu")
    assert internals.is_composite(aten.matmul.default, cpu)
    assert not internals.is_composite(aten._standard_gamma_grad.default, torch.device("mps"))
    assert isinstance(torch.nn.SyncBatchNorm(2), internals.NORM_BASES)
    assert not isinstance(torch.nn.LayerNorm(2), internals.NORM_BASES)
