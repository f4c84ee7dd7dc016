"""``torch.compile`` in the script itself; ``strangers`` has its bits and values on all engines."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.fits import fit, rows
from support.strangers import SCRIPT
from support.warm import WARM
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import quorate
from quorate.replica.streams import Stream


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def compiled() -> nn.Module:
    model: nn.Module = torch.compile(nn.Linear(6, 1), backend="aot_eager")
    return model


def test_a_checkpoint_has_the_models_own_names(tmp_path: Path) -> None:
    model = compiled()
    assert fit(model, data=rows(24), epochs=1, run_dir=tmp_path).model is model
    (saved,) = tmp_path.rglob("model.safetensors")
    assert load_file(saved).keys() == {"weight", "bias"}
    plain, loaded = nn.Linear(6, 1), compiled()
    fit(plain, data=rows(24), epochs=1, run_dir=tmp_path)  # nothing is left to do
    quorate.load_weights(loaded, saved)
    for each in (plain, loaded):
        for one, other in zip(each.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["compiled_model", "compiled_layers", "compiled_loss"])
def test_stages_of_what_the_script_compiles_are_refused_in_one_line(name: str) -> None:
    """Stages compute operators and modules separately: they would leave the compiler out."""
    words = ["run", "--devices", "cpu+cpu", str(SCRIPT), name]
    code, out, err = WARM.run(words, dict(os.environ), 200)
    assert code == 2, out + err
    (line,) = [each for each in err.splitlines() if each.startswith("quorate: split: ")]
    assert "torch.compile" in line


def test_a_tracer_gets_no_generator() -> None:
    with Stream() as stream:
        stream.reseed(1)
        graph = make_fx(lambda x: nn.functional.dropout(x, 0.5) + torch.rand(3))(torch.ones(3))
    assert not any("generator" in node.kwargs for node in graph.graph.nodes)
    assert not any("opaque" in str(node.target) for node in graph.graph.nodes)


def test_a_higher_order_operator_works_inside_a_stream() -> None:
    with Stream():
        found = torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(2),))
    assert found.tolist() == [2.0, 2.0]
