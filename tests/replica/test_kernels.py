"""Kernels: products of linear layers by oneDNN: their values, exceptions, and the choice."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.messages import expect_error
from support.runs import command, inspected, run
from torch import nn
from torch.autograd import forward_ad

from quorate.errors import SettingError, UserError
from quorate.replica.computing import Computing
from quorate.replica.kernels import MEASURED, ONEDNN, TORCH, measured, onednn, products
from quorate.replica.kernels.choice import chosen
from quorate.replica.precision import float32_products, parse, rounds_factors
from quorate.replica.streams import Stream

pytestmark = pytest.mark.skipif(products.lacking() is not None, reason=str(products.lacking()))

CPU = [torch.device("cpu")]
ROWS, INPUTS, OUTPUTS = 64, 256, 512


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Count oneDNN's products since the last call; within, layers are computed by oneDNN."""
    made = 0
    product = onednn.product

    def counted(*given: Any) -> torch.Tensor:
        nonlocal made
        made += 1
        return product(*given)

    def since() -> int:
        nonlocal made
        number, made = made, 0
        return number

    monkeypatch.setattr(onednn, "product", counted)
    with Stream(), products.by(ONEDNN):
        yield since


def gradients(loss: torch.Tensor, *of: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, of))


def example(*shape: int, bias: bool = True) -> tuple[nn.Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    layer = nn.Linear(INPUTS, OUTPUTS, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer, torch.randn(*shape, INPUTS, generator=generator).requires_grad_()


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x,
    "sequences, turned": lambda x: x.view(4, 16, INPUTS).transpose(0, 1),
    "every second": lambda x: x.repeat_interleave(2, 0)[::2],
    "expanded": lambda x: x[:1].expand(ROWS, INPUTS),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_torch_s(
    shape: str, bias: bool, calls: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed() -> list[torch.Tensor]:
        layer, x = example(ROWS, bias=bias)
        output = layer(SHAPES[shape](x))
        return [output, *gradients(output.sin().sum(), x, *layer.parameters())]

    found = computed()
    assert calls() == 3
    monkeypatch.setattr(onednn, "is_on", lambda: False)
    expected = computed()
    assert calls() == 0
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())


def test_the_same_bits_wherever_rows_lie(calls: Callable[[], int]) -> None:
    layer, x = example(ROWS)
    memory = torch.empty(ROWS * INPUTS + 64)
    found = []
    for offset in (0, 1, 3, 16, 33):
        moved = memory[offset : offset + x.numel()].view(x.shape).copy_(x.detach())
        found.append(layer(moved))
    assert calls() == 5
    assert all(torch.equal(found[0], other) for other in found)


def test_a_gradient_is_derived_once_more(calls: Callable[[], int]) -> None:
    def of_a_penalty(layer: nn.Linear, x: torch.Tensor) -> list[torch.Tensor]:
        (of_x,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
        return gradients(of_x.pow(2).sum(), x, layer.weight)

    example_64 = example(ROWS)
    found = of_a_penalty(*example_64)
    assert calls() > 0
    layer, x = example(ROWS)
    expected = of_a_penalty(layer.double(), x.double())  # float64 is never oneDNN's
    assert calls() == 0
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-3, atol=1e-5 * other.abs().max().item())


class Tagged(torch.Tensor):
    """A subclass with separate behaviour for operators."""


def autocast(layer: nn.Linear, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def forward_mode(layer: nn.Linear, x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        output = layer(forward_ad.make_dual(x.detach(), torch.ones_like(x)))
        assert forward_ad.unpack_dual(output).tangent is not None


def switched_off(layer: nn.Linear, x: torch.Tensor) -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        layer(x)


def in_another_thread(layer: nn.Linear, x: torch.Tensor) -> None:
    thread = threading.Thread(target=layer, args=[x])
    thread.start()
    thread.join()


TORCHS: list[Callable[[nn.Linear, torch.Tensor], object]] = [
    *(autocast, forward_mode, switched_off, in_another_thread),
    lambda layer, x: layer.double()(x.double()),
    lambda layer, x: torch.vmap(layer)(torch.stack([x.detach()] * 2)),
    lambda layer, x: torch.func.grad(lambda each: layer(each).sum())(x.detach()),
    lambda layer, x: layer(x[:2]),  # too few rows
    lambda layer, x: layer(x[0]),
    lambda layer, x: layer(x.as_subclass(Tagged)),
    lambda layer, x: layer.to("meta")(x.to("meta")),
    lambda layer, x: F.bilinear(x, x, torch.randn(2, INPUTS, INPUTS)),
    lambda layer, x: layer(x[:0]),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", TORCHS)
def test_what_is_torch_s(
    call: Callable[[nn.Linear, torch.Tensor], object], calls: Callable[[], int]
) -> None:
    call(*example(ROWS))
    assert calls() == 0


# --- the choice -----------------------------------------------------------------------------------


def choose(
    asked: str | None, was: str | None = None, *, width: int = 64, **computing: Any
) -> tuple[str, list[str]]:
    devices = computing.pop("devices", CPU)
    return chosen(asked, was, Computing(**computing), nn.Linear(width, width), devices)


def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(measured, "how_much_faster", lambda: asked.append(1) or 2.4)
    assert choose(None) == choose(TORCH) == choose(TORCH, ONEDNN) == (TORCH, [])
    assert choose(None, TORCH) == (TORCH, [])
    assert choose(None, ONEDNN) == choose(MEASURED, ONEDNN) == (ONEDNN, [])
    assert choose(ONEDNN) == choose(ONEDNN, TORCH) == (ONEDNN, [])
    assert asked == []  # the kernels from the beginning of a run are kept
    kernels, (said,) = choose(MEASURED)
    assert kernels == ONEDNN
    assert "2.4 times as fast" in said
    assert asked == [1]
    kernels, (said,) = choose(MEASURED, TORCH)
    assert kernels == TORCH
    assert "as when this run began" in said
    gpu = [torch.device("cuda", 0)]
    for others, reason in (
        ({"compile": True}, "the model is compiled"),
        ({"precision": parse("bf16")}, "precision is bf16"),
        ({"devices": gpu}, "no worker is on a CPU"),
        ({"width": 8}, "no linear layer of the model is large enough"),
    ):
        assert choose(MEASURED, **others) == choose(ONEDNN, **others)
        assert choose(MEASURED, **others) == (TORCH, [f"kernels: torch's, because {reason}"])
    assert asked == [1]
    monkeypatch.setattr(measured, "how_much_faster", lambda: 1.1)
    kernels, (said,) = choose(MEASURED)
    assert kernels == TORCH
    assert "1.1 times as fast" in said
    monkeypatch.setattr(products, "lacking", lambda: "this torch has none")
    assert choose(MEASURED) == (TORCH, ["kernels: torch's, because this torch has none"])
    with expect_error(UserError, name="kernels"):
        Computing().as_decided({"compile": False, "kernels": ONEDNN})


# --- runs -----------------------------------------------------------------------------------------


def ended(
    run_dir: Path, engine: str, *kernels: str, times: float = 2.4, steps: int = 4
) -> tuple[str, str, str]:
    """Return the digest of a run, the owner of its kernels, and its output."""
    options = ("--engine", *engine.split(), *kernels)
    done = run(command("kernels.py", str(run_dir), str(times), str(steps), options=options))
    assert done.code == 0, done.said
    facts = inspected(run_dir)
    return facts["digest"], facts["kernels"], done.said


@pytest.mark.slow
def test_one_digest_on_all_engines_and_a_resume_keeps_the_choice(tmp_path: Path) -> None:
    tower, two = "towers --workers 1", "--workers 2"
    whole, kernels, said = ended(tmp_path / "whole", tower, "--kernels", MEASURED)
    assert kernels == ONEDNN
    assert "sync, products by oneDNN" in said
    # torch's bits differ on most processors, and not on all.
    _, kernels, _ = ended(tmp_path / "slow", f"processes {two}", "--kernels", MEASURED, times=1.1)
    assert kernels == TORCH
    # A resume elsewhere: oneDNN would not be chosen, and nobody requests oneDNN.
    ended(tmp_path / "half", f"processes {two}", "--kernels", MEASURED, steps=1)
    digest, kernels, said = ended(tmp_path / "half", f"collective {two}", times=1.1)
    assert (digest, kernels) == (whole, ONEDNN)
    assert "same bits: no" not in said
    # torch's kernels are used on request, with a message.
    kernels, said = ended(tmp_path / "half", tower, "--kernels", TORCH, steps=5)[1:]
    assert kernels == TORCH
    assert "same bits: no, because kernels was onednn and is torch since step 4" in said


# --- bf32 -----------------------------------------------------------------------------------------


def test_bf32_is_refused_on_gpus_and_where_it_does_nothing() -> None:
    for device in [torch.device("cuda", 0), *([] if rounds_factors() else CPU)]:
        with pytest.raises(SettingError, match="precision: got 'bf32'"):
            parse("bf32", [device])


def test_the_switches_of_bf32() -> None:
    onednn_switches: Any = torch.backends.mkldnn
    kinds = (onednn_switches.matmul, onednn_switches.conv, onednn_switches.rnn)

    def now() -> list[str]:
        return [kind.fp32_precision for kind in kinds]

    before = now()
    with float32_products(parse("bf32")):
        assert now() == ["bf16"] * 3
        assert torch.get_float32_matmul_precision() == "medium"  # torch's older name agrees
        with float32_products(parse("fp32")) as said:  # as a script may have set it
            assert now() == ["ieee"] * 3
            assert bool(said) == rounds_factors()
        assert now() == ["bf16"] * 3
    assert now() == before
    assert torch.get_float32_matmul_precision() == "highest"
