"""Stages of a model: the same bits as the model, whatever they hand each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from scripts import everything
from support.cut_compared import same_bits
from support.cut_models import Nests, Residual, Sized, Tied, Told, Uses, layer, rows
from support.example_modules import EXAMPLES, example_modules
from support.messages import expect_error
from support.staged import staged_step, step
from torch import nn

from quorate.errors import CutError
from quorate.replica.pipeline.cut import cut
from quorate.replica.pipeline.stage_graph import arguments


def test_a_chain() -> None:
    model = nn.Sequential(*(layer() for _ in range(5)), nn.Linear(6, 2))
    for split in (["3"], ["1", "2.3", "5"], [str(n) for n in range(1, 6)]):
        stages = same_bits(model, split, rows(8, 6), shards=[(rows(5, 6),), (rows(2, 6),)])
        names = [name for stage in stages for name in stage.parameters]
        assert names == [name for name, _ in model.named_parameters()]


def test_everything() -> None:
    torch.manual_seed(1)

    def batch(n: int) -> tuple[torch.Tensor, ...]:
        return rows(n, 1, 8, 8), torch.randint(1, 30, (n, 12))

    for split in (["embedding"], ["norm", "classes"], ["lstm", "dropout", "words"]):
        same_bits(everything.Everything(), split, *batch(3), shards=[batch(6), batch(2)])


def test_encoder_and_decoder_of_the_chatbot() -> None:
    def batch(n: int, length: int) -> tuple[torch.Tensor, ...]:
        questions = torch.randint(4, 40, (n, length))
        questions[1:, -2:] = 0
        return questions, torch.randint(4, 40, (n, 4))

    with example_modules(EXAMPLES / "chatbot") as example:
        model = example.model.Seq2Seq(40, 16)
    for split in (["decoder"], ["attention"], ["encoder", "combined"]):
        same_bits(model, split, *batch(3, 5), shards=[batch(4, 7), batch(2, 3)])


def test_a_loss_function_that_uses_parameters_of_an_earlier_stage() -> None:
    # The same model twice, of which each loss function knows its own.
    plain, parts = Tied(), Tied()
    parts.load_state_dict(plain.state_dict())
    tokens = torch.randint(12, (3, 5))
    stages = cut(parts, ["middle.1", "words"], (tokens,))

    def its_loss(model: Tied) -> Any:
        return lambda out: (
            out.square().mean()
            + model.embedding(tokens).sin().mean()
            + model.middle[0].weight.square().sum()
        )

    one = step(plain, (tokens,), its_loss(plain))
    other = staged_step(parts, stages, (tokens,), its_loss(parts))
    assert all(map(torch.equal, one, other))
    for (name, p), q in zip(plain.named_parameters(), parts.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_skips_of_the_unet() -> None:
    def batch(n: int, size: int = 64) -> tuple[torch.Tensor]:
        return (rows(n, 3, size, size) * 60 + 120,)

    with example_modules(EXAMPLES / "segmentation") as example:
        model = example.model.UNet(3)
    stages = same_bits(model, ["down.1", "up.1"], *batch(2), shards=[batch(3, 96), batch(1)])
    assert stages[2].takes == ("stem", "cat_1")  # the first from two stages before
    same_bits(model.to(memory_format=torch.channels_last), ["up.0"], *batch(2))


def test_sums_are_in_the_order_of_the_whole_model() -> None:
    for split in (["b"], ["c"], ["b", "c"]):
        stages = same_bits(Uses(), split, rows(7, 6), shards=[(rows(3, 6),)])
        assert {"scale", "again.weight"} <= set(stages[0].shared)
        assert all("scale" not in stage.parameters for stage in stages[1:])


def test_tied_parameters() -> None:
    tokens = torch.randint(12, (3, 5))
    stages = same_bits(Tied(), ["middle.1", "words"], tokens, shards=[(tokens[:2],)])
    assert [stage.shared for stage in stages] == [("embedding.weight",)] * 3
    assert ["embedding.weight" in stage.parameters for stage in stages] == [True, False, False]


def test_nested_values() -> None:
    def batch(n: int) -> tuple[Any, ...]:
        return {"x": rows(n, 6), "names": ["a", 1], "none": None}, [rows(n, 6)]

    for split in (["takes"], ["last"], ["takes", "last"]):
        same_bits(Nests(), split, *batch(3), shards=[batch(5)])


def test_shapes_that_differ() -> None:
    for split in (["b"],):
        same_bits(Sized(), split, rows(4, 6), shards=[(rows(7, 6),), (rows(1, 6),)])
        same_bits(Sized(), split, rows(4, 3, 6), shards=[(rows(5, 2, 6),)])


def test_what_is_frozen_and_computed_without_gradients() -> None:
    for split in (["layers.0"], ["layers.1", "layers.3"], ["layers.0.1", "layers.2.2"]):
        same_bits(Residual(), split, rows(6, 6), shards=[(rows(4, 6),)])
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    same_bits(model, ["1", "2", "3"], rows(6, 6))


def test_attention_and_a_transformer() -> None:
    part = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(part, 3)
    same_bits(model, ["layers.1", "layers.2.linear1"], rows(3, 5, 8), shards=[(rows(2, 7, 8),)])

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
            self.last = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
            x = self.first(x)
            y, weights = self.attention(x, x, x, key_padding_mask=padding)
            return self.last(y) + weights.sum()

    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[:, -1] = True
    same_bits(Attends(), ["attention", "last"], rows(3, 5, 8), padding)
    same_bits(Attends(), ["last"], rows(3, 5, 8))


def test_writing_in_place() -> None:
    model = nn.Sequential(
        nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Dropout(0.2, inplace=True)
    )
    stages = same_bits(model, ["1", "3"], rows(4, 6))
    assert [stage.writes for stage in stages] == [(), ("_0",), ("_2",)]


class Tripled(torch.autograd.Function):
    """With a backward pass that is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


def test_functions_with_a_backward_of_their_own() -> None:
    apply = vars(torch.autograd.Function)["apply"]
    same_bits(Told(lambda _, x: Tripled.apply(x).tanh()), ["b"], rows(3, 6))
    assert vars(torch.autograd.Function)["apply"] is apply


@pytest.mark.parametrize("reentrant", [False, True])
def test_modules_that_are_checkpointed(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), layer(), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.utils.checkpoint.checkpoint(self.b, self.a(x), use_reentrant=reentrant)
            return self.c(x)

    model = Checkpointed()
    if reentrant:
        model.b[1] = nn.LayerNorm(6)  # BatchNorm would see its rows twice
    stages = same_bits(model, ["c"], rows(4, 6), shards=[(rows(2, 6),)])
    assert {"b.0.weight", "b.1.bias"} <= set(stages[0].parameters)


def test_an_encoder_and_a_decoder_of_torchs() -> None:
    model = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
    shards = [(rows(3, 7, 8), rows(3, 2, 8))]
    same_bits(model, ["decoder"], rows(2, 5, 8), rows(2, 4, 8), shards=shards)
    split = ["encoder.layers.1", "decoder.layers.0", "decoder.layers.1.multihead_attn"]
    same_bits(model, split, rows(2, 5, 8), rows(2, 4, 8), shards=shards)


def test_hooks_of_modules_run() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].register_forward_hook(lambda module, args, out: out * 2)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[2].register_full_backward_hook(lambda module, grads, _: (grads[0],))
    model[1].weight.register_hook(lambda grad: grad * 3)
    model.register_forward_hook(lambda module, args, out: out.tanh())
    same_bits(model, ["1", "2"], rows(4, 6))


def test_evaluation_has_a_cut_of_its_own() -> None:
    model = Sized().eval()
    (first, last) = cut(model, ["b"], (rows(3, 6),))
    torch.manual_seed(0)
    expected = model(rows(5, 6))
    torch.manual_seed(0)
    found = last.run(first.run(arguments(model, (rows(5, 6),))))
    assert torch.equal(found["output"], expected)
    model.train()
    with expect_error(CutError, name="split"):
        first.run({"x": rows(5, 6)})
