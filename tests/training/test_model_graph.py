"""The graph of a model in summaries, read back with TensorBoard's own reader and graph plugin."""

from __future__ import annotations

import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from google.protobuf import text_format
from support import small
from support.digests import digest_of
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.witness import forward_graph

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of a library that it brings along
    from tensorboard.plugins.graph.graphs_plugin import GraphsPlugin

ROWS = TensorDataset(
    torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
)

Edges = dict[str, tuple[str, list[str]]]  # name -> operator, inputs


class Branched(nn.Module):
    """Has what tracers stumble over: a branch on values, a layer called twice, writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.blocks = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(inplace=True))
        self.register_buffer("scale", torch.ones(4))
        self.offset = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        x = self.layer(x) if x.sum().item() < 1e9 else x.exp()
        x = self.blocks(x) * self.scale + self.offset
        x[:, 0] = 0.0
        left, right = x.chunk(2, dim=1)
        return right.to(right.device) @ left.T.contiguous()[:2, :2]


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    logits = model(batch[0])
    return {"loss": F.cross_entropy(logits, batch[1]), "size": logits.detach().abs().mean()}


BRANCHED: Edges = {
    "batch/0": ("Rows", []),
    "batch/1": ("Rows", []),
    "Branched/layer/weight": ("Parameter", []),
    "Branched/layer/bias": ("Parameter", []),
    "Branched/layer/linear": (
        "linear",
        ["batch/0", "Branched/layer/weight", "Branched/layer/bias"],
    ),
    "Branched/sum": ("sum", ["Branched/layer/linear"]),
    "Branched/layer/linear_1": (
        "linear",
        ["Branched/layer/linear", "Branched/layer/weight", "Branched/layer/bias"],
    ),
    "Branched/blocks/0/num_batches_tracked": ("Buffer", []),
    "Branched/blocks/0/add": ("add", ["Branched/blocks/0/num_batches_tracked"]),
    "Branched/blocks/0/running_mean": ("Buffer", []),
    "Branched/blocks/0/running_var": ("Buffer", []),
    "Branched/blocks/0/weight": ("Parameter", []),
    "Branched/blocks/0/bias": ("Parameter", []),
    "Branched/blocks/0/batch_norm": (
        "batch_norm",
        [
            "Branched/layer/linear_1",
            "Branched/blocks/0/running_mean",
            "Branched/blocks/0/running_var",
            "Branched/blocks/0/weight",
            "Branched/blocks/0/bias",
        ],
    ),
    "Branched/blocks/1/relu": ("relu", ["Branched/blocks/0/batch_norm"]),
    "Branched/scale": ("Buffer", []),
    "Branched/mul": ("mul", ["Branched/blocks/1/relu", "Branched/scale"]),
    "Branched/constant": ("Constant", []),
    "Branched/add": ("add", ["Branched/mul", "Branched/constant"]),
    "Branched/setitem": ("setitem", ["Branched/add"]),
    "Branched/chunk": ("chunk", ["Branched/setitem"]),
    "Branched/T": ("T", ["Branched/chunk"]),
    "Branched/contiguous": ("contiguous", ["Branched/T"]),
    "Branched/getitem": ("getitem", ["Branched/contiguous"]),
    "Branched/matmul": ("matmul", ["Branched/chunk:1", "Branched/getitem"]),
}


def trainer(run_dir: Path | None, **options: Any) -> quorate.Trainer:
    return quorate.Trainer(
        Branched,
        loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **{"batch_size": 8, "shards": 2, "devices": ["cpu"] * 2, "run_dir": run_dir} | options,
    )


def events_of(run_dir: Path) -> list[Any]:
    files = sorted((run_dir / "summaries").glob("*tfevents*"))
    return [event for file in files for event in EventFileLoader(str(file)).Load()]


def shown(run_dir: Path) -> GraphDef:
    """Return the graph that TensorBoard's page gets, by the plugin that gives it."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(run_dir))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(run_dir))
    plugin = GraphsPlugin(TBContext(data_provider=provider))
    info = plugin.info_impl(RequestContext(), experiment="0")
    assert info["summaries"]["run_graph"]
    text, kind = plugin.graph_impl(RequestContext(), "summaries", None, False, experiment="0")
    assert kind == "text/x-protobuf"
    return text_format.Parse(text, GraphDef())


def edges(graph: GraphDef) -> Edges:
    return {node.name: (node.op, list(node.input)) for node in graph.node}


def shapes(graph: GraphDef, name: str) -> list[list[int]]:
    (node,) = (node for node in graph.node if node.name == name)
    found = node.attr["_output_shapes"].list.shape
    return [[dim.size for dim in shape.dim] for shape in found]


def test_the_graph_is_that_of_the_forward_pass_as_it_ran(tmp_path: Path) -> None:
    trainer(tmp_path / "run").fit(ROWS)
    graph = shown(tmp_path / "run")
    found = edges(graph)
    assert {n: e for n, e in found.items() if n.startswith(("batch", "Branched"))} == BRANCHED
    assert found["loss_function/cross_entropy"] == (
        "cross_entropy",
        ["Branched/matmul", "batch/1"],
    )
    assert found["results/loss"] == ("Result", ["loss_function/cross_entropy"])
    assert found["results/size"] == ("Result", ["loss_function/mean"])
    # Of a shard: half of the 8 rows.
    assert shapes(graph, "batch/0") == [[4, 4]]
    assert shapes(graph, "Branched/chunk") == [[4, 2], [4, 2]]
    assert {node.device for node in graph.node if node.op != "Result"} == {"/device:CPU:0"}
    inputs = {name.partition(":")[0] for _, names in found.values() for name in names}
    assert inputs <= found.keys()  # or TensorBoard draws none of it


def test_a_run_has_one_graph_however_often_it_is_resumed(tmp_path: Path) -> None:
    for epochs in (1, 2, 3):
        trainer(tmp_path / "run").fit(ROWS, epochs=epochs)
    assert len([*(tmp_path / "run/summaries").glob("*tfevents*")]) == 3
    assert [e.step for e in events_of(tmp_path / "run") if e.HasField("graph_def")] == [0]


def test_a_run_whose_summaries_were_deleted_gets_another(tmp_path: Path) -> None:
    trainer(tmp_path / "run").fit(ROWS)
    for file in (tmp_path / "run/summaries").iterdir():
        file.unlink()
    trainer(tmp_path / "run").fit(ROWS, epochs=2)
    assert edges(shown(tmp_path / "run"))["Branched/matmul"] == BRANCHED["Branched/matmul"]


def test_what_does_not_bear_to_be_watched_is_shown_as_its_modules(tmp_path: Path) -> None:
    class Shy(Branched):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frame = sys._getframe()
            while (outer := frame.f_back) is not None:
                frame = outer
                if "forward_graph" in frame.f_code.co_filename:
                    raise RuntimeError("somebody is looking")
            return super().forward(x)

    run = quorate.Trainer(
        Shy,
        loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
        devices=["cpu"],
        run_dir=tmp_path / "run",
    )
    run.fit(ROWS)
    assert run.global_step == 1
    assert_modules(edges(shown(tmp_path / "run")), "Shy")


def test_what_nobody_could_look_at_is_shown_as_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_graph, "MOST_NODES", 10)
    trainer(tmp_path / "run").fit(ROWS)
    assert_modules(edges(shown(tmp_path / "run")), "Branched")


def assert_modules(found: Edges, root: str) -> None:
    assert found == {
        f"{root}/scale": ("Buffer", []),
        f"{root}/{root}": (root, [f"{root}/scale"]),
        f"{root}/layer/weight": ("Parameter", []),
        f"{root}/layer/bias": ("Parameter", []),
        f"{root}/layer/Linear": ("Linear", [f"{root}/layer/weight", f"{root}/layer/bias"]),
        **{
            f"{root}/blocks/0/{name}": (kind, [])
            for kind, names in (
                ("Parameter", ("weight", "bias")),
                ("Buffer", ("running_mean", "running_var", "num_batches_tracked")),
            )
            for name in names
        },
        f"{root}/blocks/0/BatchNorm1d": (
            "BatchNorm1d",
            [
                f"{root}/blocks/0/{name}"
                for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
            ],
        ),
        f"{root}/blocks/1/ReLU": ("ReLU", []),
    }


SEEN: list[float] = []  # by a loss function: a global that outlives a shard


class Seen(quorate.Callback):
    before_training: list[float]

    def started(self, trainer: Any) -> None:
        self.before_training = list(SEEN)


def drawing_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    noise = random.random() + np.random.rand() + torch.rand(()).item()
    value = small.loss(model, batch)
    SEEN.append(value.item())
    return value * (1 + noise)


@pytest.mark.parametrize("workers", [1, 3])
def test_nothing_depends_on_it(tmp_path: Path, workers: int) -> None:
    ends = []
    for number, every_s in enumerate((None, None, 20.0)):  # the first of a process tries once more
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        SEEN.clear()
        run = quorate.Trainer(
            small.Small,
            drawing_loss,
            optimizer=quorate.Optimize(
                lambda parameters: torch.optim.AdamW(parameters, lr=0.01), ema_decay=0.9
            ),
            batch_size=12,
            shards=4,
            devices=["cpu"] * workers,
            run_dir=quorate.RunDir(tmp_path / f"{number}", summary_every_s=every_s),
        )
        seen = Seen()
        run.fit(small.DATA, epochs=2, callbacks=[seen])
        draws = random.random(), np.random.rand(), torch.rand(()).item()
        ends.append((digest_of(run), draws, seen.before_training))
    assert not (tmp_path / "1/summaries").exists()
    assert "Small/first/linear" in edges(shown(tmp_path / "2"))
    assert ends[1] == ends[2]
