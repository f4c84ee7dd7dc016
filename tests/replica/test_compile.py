"""``compile=True``: the same bits whoever computes, and the behaviour where compiling fails."""

import functools
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch
from support.messages import expect_error
from support.warm import WARM
from torch import nn

from quorate.coordination.epochs import Course
from quorate.errors import CompileError, SharedError
from quorate.replica import compiled
from quorate.replica.beside import shared as shared_values
from quorate.replica.beside.at import At
from quorate.replica.beside.shared import Shared
from quorate.replica.beside.view import ValuesView
from quorate.replica.compiled import Compiled

SCRIPT = Path(__file__).parents[1] / "scripts" / "compiled.py"
HAS_COMPILER = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


def run(folder: Path, *arguments: str, **env: str) -> tuple[str, set[str], list[float]]:
    """Return the output, the digests in the output, and the last losses."""
    words = ["run", str(SCRIPT), str(folder / "run"), *arguments]
    code, out, err = WARM.run(words, {**os.environ, **env}, 400)
    assert code == 0, out + err
    lines = [line.split() for line in out.splitlines()]
    digests = {words[1] for words in lines if words[:1] == ["digest"]}
    losses = [float(words[2]) for words in lines if words[:2] == ["last", "loss"]]
    return out + err, digests, losses


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler, which torch.compile needs on CPUs")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="ranks are forked")
def test_one_digest_on_workers_and_on_towers_after_a_resume(tmp_path: Path) -> None:
    """Dropout draws from the shard's stream: else the losses would differ from plain losses.

    Towers that go on in mid-run have compiled the loss for later steps than other workers.
    """
    # An earlier compilation would come from torch's cache, without a trace of the loss.
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    text, digests, losses = run(tmp_path, "processes", **own)
    assert len(digests) == 1, text
    assert text.count("digest ") == 2
    assert "compile is off" not in text
    assert run(tmp_path / "ranks", "ranks", **own)[1] == digests
    nowhere = {"CXX": "/nowhere/g++", "PATH": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "none")}
    said, without, plain = run(tmp_path / "2", "processes", **nowhere)
    assert losses[-1] == pytest.approx(plain[-1], rel=1e-5)
    assert without != digests
    off = "compile is off: a shard of 8x6, 8 cannot be compiled: no C++ compiler works here"
    assert off in said


# --- without a C++ compiler: graphs run as torch traced them ------------------------------------


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of graphs made, while torch's backend runs the graphs unchanged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own modules
        import torch._inductor.compile_fx as inductor

    made: list[str] = []

    def as_it_is(graph: torch.fx.GraphModule, _inputs: Any, *, config_patches: Any) -> Any:
        assert config_patches["fallback_random"]
        made.append(graph.print_readable(print_output=False))
        return graph.forward

    monkeypatch.setattr(inductor, "compile_fx", as_it_is)
    return made


@pytest.fixture
def nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide a ``Shared`` of another test, perhaps alive: messages would mention the object."""
    monkeypatch.setattr(compiled, "are_any", lambda: False)
    torch._dynamo.reset()


Work = Callable[[Any], float]


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).mean()


def work(model: nn.Module, batch: Any) -> Work:
    return lambda loss: float(loss(model, batch))


def test_each_shape_is_compiled_once_and_so_many_at_most(
    traced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "MOST_SHAPES", 3)
    model, loss = nn.Linear(3, 1), Compiled(mean, threads=1)
    batches = [[torch.ones(rows, 3)] for rows in (2, 3, 4)]
    for batch in [*batches, *batches]:
        found = loss.run(batch, training=False, work=work(model, batch))
        assert found == pytest.approx(float(mean(model, batch)))
    assert len(traced) == 3
    assert not any("Sym" in text for text in traced)  # no dynamic shapes
    batch = [torch.ones(5, 3)]
    with expect_error(CompileError, name="compile"):
        loss.run(batch, training=False, work=work(model, batch))


@pytest.mark.usefixtures("nothing_shared")
def test_code_that_depends_on_a_changing_number_is_refused(
    traced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "MOST_REPEATS", 2)

    class Counts(nn.Linear):
        calls = 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return super().forward(x) * self.calls

    model, loss, batch = Counts(3, 1), Compiled(mean, threads=1), [torch.ones(2, 3)]
    for _ in range(3):
        loss.run(batch, training=False, work=work(model, batch))
    with expect_error(CompileError, name="compile"):
        loss.run(batch, training=False, work=work(model, batch))


def test_a_mistake_of_the_user_is_raised_as_it_is_and_torchs_with_its_reason(
    traced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.compile_fx as inductor

    def fails(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no kernel\nfor this")

    model, loss = nn.Linear(3, 1), Compiled(mean, threads=1)
    batch = [torch.ones(2, 4)]
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as caught:
        loss.run(batch, training=False, work=work(model, batch))
    assert not isinstance(caught.value, CompileError)
    monkeypatch.setattr(inductor, "compile_fx", fails)
    batch = [torch.ones(2, 3)]
    with expect_error(CompileError, name="compile", fix="leave compile off"):
        loss.run(batch, training=False, work=work(model, batch))


# --- losses with a position -----------------------------------------------------------------------


def annealed(model: nn.Module, batch: Any, at: Any) -> torch.Tensor:
    return mean(model, batch) * min(1.0, 4 * at.progress) * 0.99**at.step + at.epoch


def branches(model: nn.Module, batch: Any, at: Any) -> torch.Tensor:
    found = mean(model, batch)
    for _ in range(min(at.step, 3)):
        found = found * 2
    return found if at.step % 3 else found + at.step


def of_rows(model: nn.Module, batch: Any, at: Any) -> torch.Tensor:
    weights = torch.arange(100.0)[torch.from_numpy(at.rows)]
    return (model(batch[0]).sum(1) * weights).mean() + (1.0 if at.training else 2.0)


def at_step(step: int) -> At:
    rows = np.arange(2) + step
    rows.flags.writeable = False
    return At(step, step // 6, True, rows, Course(24))


@pytest.mark.parametrize(("loss", "graphs"), [(annealed, 2), (branches, 7), (of_rows, 1)])
def test_one_graph_for_all_steps(traced: list[str], loss: Any, graphs: int) -> None:
    """Make one graph, except for the ways that Python takes by the number of the step."""
    model, loop = nn.Linear(3, 1), Compiled(loss, threads=1)
    batch = [torch.ones(2, 3)]
    for step in range(24):
        at = at_step(step)

        def work(loss: Any, at: At = at) -> float:
            return float(loss(model, batch, at))

        found = loop.run(batch, training=True, work=work)
        assert found == pytest.approx(float(loss(model, batch, at)), rel=1e-6, abs=1e-9)
    assert len(traced) <= graphs


# --- losses with shared values --------------------------------------------------------------------


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    monkeypatch.setattr(shared_values, "_known", WeakValueDictionary())
    values: dict[str, Any] = {"beta": 0.0, "count": 0, "is_on": True, "note": "a", "nothing": None}
    return Shared("course", **values, bank=torch.zeros(3), teacher=nn.Linear(3, 1))


def set_as_at(shared: Shared, step: int) -> None:
    """Set numbers of both signs, zero, 1.0, and some without a short fraction."""
    shared.beta = (0.0, 1.0, -0.1, 2.5e-7, 1e6 / 3, -1.0)[step % 6]
    shared.count = (0, 1, -1, -2, 7, 1 << 50)[step % 6]
    shared.bank = torch.full((3,), float(step))
    for parameter in shared.teacher.parameters():
        parameter.data.fill_(step / 7)


def computed(loop: Compiled, loss: Any, batch: Any, model: nn.Module) -> tuple[float, float]:
    """Return the result of a shard, compiled and not."""
    view = ValuesView(torch.device("cpu"))
    with view.reading():
        found = loop.run(batch, training=True, work=work(model, batch))
        return found, float(loss(model, batch))


def test_one_graph_for_all_values(traced: list[str], shared: Shared) -> None:
    """Make more graphs only for Python's decisions by values, and for values other than numbers."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        (x,) = batch
        kept = model(x) * shared.beta + (1 - shared["beta"]) * shared.teacher(x)
        found = (kept + shared.bank.sum() + shared.count / 3).mean()
        return found * 2 if shared.is_on else found

    model, loop = nn.Linear(3, 1), Compiled(loss, threads=1)
    batch = [torch.ones(2, 3)]
    for step in range(12):
        set_as_at(shared, step)
        found, plain = computed(loop, loss, batch, model)
        assert found == pytest.approx(plain, rel=1e-6, abs=1e-9)
    assert len(traced) == 1
    shared.is_on = False
    found, plain = computed(loop, loss, batch, model)
    assert found == pytest.approx(plain, rel=1e-6)
    assert len(traced) == 2


def by_exponential(shared: Shared, model: nn.Module, batch: Any) -> torch.Tensor:
    return mean(model, batch) * math.exp(-shared.beta)  # each number would be compiled in


def in_two_graphs(shared: Shared, model: nn.Module, batch: Any) -> torch.Tensor:
    """Read a value in two graphs: in between another thread could set a new value."""
    found = mean(model, batch) * shared.beta
    torch._dynamo.graph_break()
    return found * shared.beta


def writes(shared: Shared, model: nn.Module, batch: Any) -> torch.Tensor:
    return mean(model, batch) + shared.bank.add_(1).sum()


@pytest.mark.parametrize(
    ("loss", "error"),
    [(by_exponential, CompileError), (in_two_graphs, CompileError), (writes, SharedError)],
)
def test_what_cannot_be_compiled_with_shared_values_is_refused(
    loss: Any, error: type[Exception], traced: list[str], shared: Shared
) -> None:
    given = functools.partial(loss, shared)
    with expect_error(error):
        computed(Compiled(given, threads=1), given, [torch.ones(2, 3)], nn.Linear(3, 1))
