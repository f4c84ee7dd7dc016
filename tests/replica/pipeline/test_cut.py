"""Stages of a model: the same bits as the model, whatever they hand each other."""

from __future__ import annotations

import copy
import gc
import math
import random
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from scripts import everything
from support.example_modules import EXAMPLES, example_modules
from support.staged import staged_step, step
from torch import nn

from quorate.errors import CutError
from quorate.replica.pipeline.cut import candidates, cut
from quorate.replica.pipeline.stage_graph import arguments


def total(output: Any) -> torch.Tensor:
    from quorate.replica import nested

    found = [t.float().square().mean() for t in nested.tensors(output) if t.is_floating_point()]
    return torch.stack(found).sum()


def same_bits(
    model: nn.Module,
    split: Sequence[str],
    *args: Any,
    loss: Any = total,
    shards: Sequence[tuple[Any, ...]] = (),
) -> Any:
    """Compare the model with its stages over several shards; return the stages."""
    torch.manual_seed(7)
    plain, parts = copy.deepcopy(model), copy.deepcopy(model)
    stages = cut(parts, split, args)
    assert len(stages) == len(split) + 1
    for number, shard in enumerate([args, *shards]):
        found = []
        for one in (plain, parts):
            for parameter in one.parameters():
                parameter.grad = None
            torch.manual_seed(number)
            outputs = (
                step(one, shard, loss) if one is plain else staged_step(one, stages, shard, loss)
            )
            grads = {name: p.grad for name, p in one.named_parameters()}
            found.append((outputs, grads, dict(one.named_buffers()), torch.get_rng_state()))
        (out, grads, buffers, drawn), (out_2, grads_2, buffers_2, drawn_2) = found
        assert len(out) == len(out_2)
        assert all(map(torch.equal, out, out_2))
        assert grads.keys() == grads_2.keys()
        for name, grad in grads.items():
            other = grads_2[name]
            assert (grad is None) == (other is None), name
            assert grad is None or torch.equal(grad.to_dense(), other.to_dense()), name
        for name, buffer in buffers.items():
            assert torch.equal(buffer, buffers_2[name]), name
        assert torch.equal(drawn, drawn_2)
    return stages


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3))


class Uses(nn.Module):
    """A parameter, a module and values used in several stages, several times in each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(rows(6))
        self.again = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.again(self.a(x)) * self.scale + x.sin() * self.scale
        y = self.b(first) * self.scale + first * self.scale.exp() + self.again(first)
        y = y * first.tanh() + self.again(y)
        z = self.c(y + first) * self.scale + y * first + self.again(y) * self.a.weight.sum()
        return z * self.scale + first.square() + y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.words = nn.Linear(6, 12, bias=False)
        self.words.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(self.middle(self.embedding(tokens)) + self.embedding(tokens.flip(1)))


class Point(NamedTuple):
    x: torch.Tensor
    extra: torch.Tensor | None


class Nests(nn.Module):
    """Modules that give and take dicts, tuples, None and numbers; parts of the same kinds."""

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
            y = self.layer(batch["x"])
            return {"pair": (y, None), "rows": len(y), "point": Point(y * 2, None)}

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, given: dict[str, Any], point: Point, none: None) -> Any:
            assert none is None
            assert point.extra is None
            return [self.layer(given["pair"][0]) / given["rows"], {"point": point}]

    def __init__(self) -> None:
        super().__init__()
        self.gives, self.takes, self.last = Nests.Gives(), Nests.Takes(), nn.Linear(6, 6)

    def forward(self, batch: dict[str, Any], *more: Any, mask: Any = None) -> dict[str, Any]:
        given = self.gives(batch)
        pair, number = given["pair"], given["rows"]
        point = Point(pair[0] + more[0][0], None)
        out, named = self.takes(given, point, pair[1])
        assert mask is None
        return {"out": (self.last(out), None), "rows": number, "point": named["point"], **batch}


class Sized(nn.Module):
    """Shapes, factories, branches on the number of dimensions, loops, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("offset", torch.ones(4))
        self.plain = torch.arange(4.0)  # neither parameter nor buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, *rest = x.shape
        if x.ndim == 3 and len(rest) == 2:
            x = x.mean(1)
        y = self.a(x).view(n, 2, -1).transpose(1, 2).reshape(len(x), 8)
        y = y + torch.arange(n, device=x.device)[:, None] + torch.zeros(n, 8, dtype=y.dtype)
        y = y + torch.randn(1, 8) + torch.rand(len(x), 8) + torch.rand_like(y)
        y = F.dropout(y, 0.4, self.training)
        z = self.b(y)
        for part in z.chunk(2, dim=1):
            z = torch.cat([part, z], dim=1)
        z = z[:, :4] * self.offset + self.plain
        z[:, 0] += 1
        z += torch.full((n, 4), 0.5) * (z > 0).to(z.dtype)
        return z / math.sqrt(z.shape[-1])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.frozen(x).relu()
        beside = x
        for each in self.layers:
            x = x + each(x)
        with torch.no_grad():
            mean = x.mean()
        return x - mean + beside


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


def test_a_cut_changes_nothing() -> None:
    model = Sized()
    with torch.no_grad():
        model.offset.add_(3)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), dict(vars(model))
    patched = nn.Module.__call__, nn.Module.__getattr__, len, isinstance, torch.zeros
    cut(model, ["b"], (rows(3, 6),))
    with pytest.raises(CutError):
        cut(model, ["b.nothing"], (rows(3, 6),))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert vars(model) == before[2]
    assert patched == (nn.Module.__call__, nn.Module.__getattr__, len, isinstance, torch.zeros)


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


def test_nothing_of_the_example_is_kept() -> None:
    kept = []

    def notes(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        kept.append(weakref.ref(_quorate_value(y)))
        return y

    def _quorate_value(recorded: Any) -> torch.Tensor:
        return object.__getattribute__(recorded, "_quorate_value")

    stages = cut(Told(notes), ["b"], (rows(3, 6),))
    gc.collect()
    assert len(stages) == 2
    assert kept[0]() is None


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
    with pytest.raises(CutError, match=r"training was False where the model was cut, and is True"):
        first.run({"x": rows(5, 6)})


class Told(nn.Module):
    """A forward pass with one thing that it does."""

    def __init__(self, does: Any) -> None:
        super().__init__()
        self.a, self.b, self.does, self.calls = nn.Linear(6, 6), nn.Linear(6, 6), does, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = self.does(self, x)
        return self.b(x)


def branches(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def loops(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for row in range(x.shape[0]):
        x = x + row
    return x


def test_a_shard_that_goes_another_way_is_found_out() -> None:
    with torch.no_grad():
        model = Told(branches)
        model.a.weight.copy_(torch.eye(6))
        model.a.bias.zero_()
    first, _ = cut(model, ["b"], (torch.ones(3, 6),))
    first.run({"x": torch.ones(5, 6)})
    said = r"test_cut.py, line \d+: forward went by bool True where the model was cut, and in this"
    with pytest.raises(CutError, match=said):
        first.run({"x": -torch.ones(5, 6)})
    first, _ = cut(Told(loops), ["b"], (rows(3, 6),))
    with pytest.raises(CutError, match=r"went by index 3 where .* cut, .* shard it is 5"):
        first.run({"x": rows(5, 6)})
    first, _ = cut(Told(lambda m, x: x * m.calls), ["b"], (rows(3, 6),))
    first.run({"x": rows(5, 6)})
    first, _ = cut(Nests(), ["last"], ({"x": rows(2, 6)}, [rows(2, 6)]))
    with pytest.raises(CutError, match="argument mask of forward is 'tensor' in this shard"):
        first.run({"batch": {"x": rows(2, 6)}, "more": ([rows(2, 6)],), "mask": rows(2)})


def test_an_attribute_that_changes_is_found_out() -> None:
    model = Told(lambda m, x: x * m.calls)
    first, _ = cut(model, ["b"], (rows(3, 6),))
    model.calls = 2
    with pytest.raises(CutError, match="calls was 0 where the model was cut, and is 2"):
        first.run({"x": rows(5, 6)})


def sets(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.calls += 1
    return x


def raises(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("not so")


def closes_over(module: Any, x: torch.Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(lambda y: y + x, x.sin(), use_reentrant=False)


def lowered(module: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module.a(x).float()


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (sets, "forward sets calls, which no stage would; put what is done there in a module"),
        (raises, r"test_cut.py, line \d+: forward cannot be followed: ValueError: not so; put"),
        (lambda _, x: x * random.random(), r"test_cut.py, line \d+: forward draws from Python's"),
        (lambda _, x: x * np.random.rand(), "forward draws from Python's or NumPy's generator"),
        (lowered, "forward switches autocast"),
        (closes_over, r"line \d+: a function has a value of forward that it is not given; give it"),
    ],
)
def test_what_stages_would_not_do_is_refused(does: Any, said: str) -> None:
    model = Told(does)
    with pytest.raises(CutError, match=said):
        cut(model, ["b"], (rows(3, 6),))
    assert model.calls == 0
    assert model.training


def test_what_other_threads_draw_is_theirs() -> None:
    def draws(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: (random.random(), np.random.rand()))
        thread.start()
        thread.join()
        return x

    assert len(cut(Told(draws), ["b"], (rows(3, 6),))) == 2


class WritesEarlier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.a(x).sin()
        y = self.b(x)
        early.mul_(2)
        return self.c(y) + early


def test_a_value_that_one_stage_writes_and_another_one_reads() -> None:
    same_bits(WritesEarlier(), ["b"], rows(3, 6))
    said = r"test_cut.py, line \d+: stage 1 writes what stage 2 reads; cut elsewhere"
    with pytest.raises(CutError, match=said):
        cut(WritesEarlier(), ["b", "c"], (rows(3, 6),))
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm)
    with pytest.raises(CutError, match=r"buffer 1.* is written in stages 0 and 1"):
        cut(model, ["2"], (rows(3, 6),))


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (["convolutoin"], "the model has no module 'convolutoin'; did you mean convolution.$"),
        (["zzz"], "no module 'zzz'; it has convolution, norm, embedding, lstm, dropout, classes"),
        (["unused"], "forward does not call unused with this batch; cut before one of norm, emb"),
        (["lstm", "lstm"], "lstm is named twice; name each module once"),
        (["convolution"], "no module is called between the model and convolution: a stage would"),
    ],
)
def test_wrong_cuts(split: list[str], said: str) -> None:
    batch = rows(3, 1, 8, 8), torch.randint(1, 30, (3, 12))
    with pytest.raises(CutError, match=said):
        cut(everything.Everything(), split, batch)


def test_where_a_model_may_be_cut() -> None:
    batch = rows(3, 1, 8, 8), torch.randint(1, 30, (3, 12))
    expected = ("norm", "embedding", "lstm", "dropout", "classes", "words")
    assert candidates(everything.Everything(), batch) == expected
    for name in expected:
        assert len(cut(everything.Everything(), [name], batch)) == 2
    model = nn.Sequential(layer(), layer())
    assert candidates(model, (rows(3, 6),)) == ("1",)
    with pytest.raises(CutError, match=r"called between 1 and 1.0: .*; cut before one of 1$"):
        cut(model, ["1", "1.0"], (rows(3, 6),))
