"""``torch.compile`` in the script itself: plain torch's values, and one digest on all engines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scripts import compiles_itself as script
from support.warm import WARM

import quorate
from quorate.replica.digest import digest
from quorate.replica.streams import Stream

SCRIPT = Path(script.__file__)
HAS_COMPILER = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def trained(kind: str, workers: int, dropout: float = 0.2) -> str:
    model, loss = script.made(kind, dropout=dropout)
    trainer = script.trainer(model, loss, quorate.Workers(workers, engine="towers"))
    trainer.fit(script.data(), epochs=1, shuffle=False)
    return digest(model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", script.KINDS)
def test_one_digest_on_one_tower_and_on_two(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Dropout draws from the shard's stream, and nothing is said of draws by the compiler."""
    assert trained(kind, 1) == trained(kind, 2)
    assert "same bits: no" not in caplog.text
    assert "one at a time" not in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("kind", ["model", "regional"])
def test_values_are_those_of_a_plain_loop_over_what_is_compiled(kind: str) -> None:
    model, loss = script.made(kind, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = script.data().tensors
    for update in range(2):
        optimizer.zero_grad()
        for shard in range(4):
            begin = 16 * update + 4 * shard
            (loss(model, [part[begin : begin + 4] for part in rows]) / 4).backward()
        optimizer.step()
    ours, function = script.made(kind, dropout=0.0)
    trainer = script.trainer(ours, function, quorate.Workers(2, engine="towers"))
    trainer.fit(script.data(), epochs=1, shuffle=False)
    for one, other in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_towers_compute_what_compile_made() -> None:
    """``copy.deepcopy`` leaves out what ``module.compile()`` did: a copy would be another model."""
    model, loss = script.made("regional")
    calls = []
    for block in model.blocks:
        block.compile(backend=lambda graph, _: lambda *given: (calls.append(1), graph(*given))[1])
    trainer = script.trainer(model, loss, quorate.Workers(2, engine="towers"))
    trainer.fit(script.data(), steps=2)
    shards = 2 * 4
    assert len(calls) >= 2 * shards


@pytest.mark.slow
def test_a_checkpoint_has_the_models_own_names(tmp_path: Path) -> None:
    model, loss = script.made("model")
    trainer = script.trainer(model, loss, run_dir=tmp_path)
    trainer.fit(script.data(), epochs=1)
    assert trainer.model is model
    (saved,) = tmp_path.rglob("model.safetensors")
    assert load_file(saved).keys() == script.made("none")[0].state_dict().keys()
    plain, loss = script.made("none")
    resumed = script.trainer(plain, loss, run_dir=tmp_path)
    resumed.fit(script.data(), epochs=1)  # nothing is left to do
    again, _ = script.made("model")
    quorate.load_weights(again, saved)
    for each in (plain, again):
        for one, other in zip(each.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "loss"])
def test_one_digest_on_processes_and_ranks(kind: str) -> None:
    found = []
    for options in ("--workers 1", "--workers 2", "--workers 2 --engine collective"):
        words = ["run", *options.split(), str(SCRIPT), kind]
        code, out, err = WARM.run(words, dict(os.environ), 200)
        assert code == 0, out + err
        found.append([line for line in out.splitlines() if line.startswith("digest")])
    assert found[0]
    assert found == [found[0]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "block", "regional", "function", "loss"])
def test_stages_of_what_the_script_compiles_are_refused_in_one_line(kind: str) -> None:
    """Stages compute operators and modules one by one: they would leave the compiler out."""
    words = ["run", "--devices", "cpu+cpu", str(SCRIPT), kind, "eager"]
    code, out, err = WARM.run(words, dict(os.environ), 200)
    assert code == 2, out + err
    assert "digest" not in out
    (line,) = [each for each in err.splitlines() if each.startswith("quorate: split: ")]
    assert "torch.compile" in line


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler, which torch.compile needs on CPUs")
def test_inductor_traces_no_generator_of_ours(tmp_path: Path) -> None:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    found = []
    for options in ("--workers 1 --engine processes", "--workers 2 --engine towers"):
        words = ["run", *options.split(), str(SCRIPT), "model", "inductor"]
        code, out, err = WARM.run(words, env, 400)
        assert code == 0, out + err
        found.append([line for line in out.splitlines() if line.startswith("digest")])
    assert found[0]
    assert found == [found[0]] * 2


def test_a_tracer_gets_no_generator() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    with Stream() as stream:
        stream.reseed(1)
        graph = make_fx(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand(3))(
            torch.ones(3)
        )
    assert not any("generator" in node.kwargs for node in graph.graph.nodes)
    assert not any("opaque" in str(node.target) for node in graph.graph.nodes)


def test_a_higher_order_operator_works_inside_a_stream() -> None:
    with Stream():
        found = torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(2),))
    assert found.tolist() == [2.0, 2.0]
