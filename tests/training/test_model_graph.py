"""The graph of a model in summaries, read back with TensorBoard's own reader and graph plugin."""

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from google.protobuf import text_format
from support import small
from support.digests import digest_of
from support.fits import fit
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from torch import nn
from torch.utils.data import TensorDataset

import quorate

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of a bundled library
    from tensorboard.plugins.graph.graphs_plugin import GraphsPlugin

ROWS = TensorDataset(
    torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
)

Edges = dict[str, tuple[str, list[str]]]  # name -> operator, inputs


class Branched(nn.Module):
    """Has difficulties for tracers: a branch on values, a layer called twice, writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.blocks = nn.Sequential(nn.ReLU(inplace=True))
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


def edges_of(text: str, root: str) -> Edges:
    """Return lines of a name, an operator and inputs as edges; ``~`` stands for the model."""
    lines = [line.replace("~", root).split() for line in text.strip().splitlines()]
    return {name: (operator, inputs) for name, operator, *inputs in lines}


BRANCHED = edges_of(
    """
~/layer/weight Parameter
~/layer/bias Parameter
~/scale Buffer
batch/0 Rows
batch/1 Rows
~/layer/linear linear batch/0 ~/layer/weight ~/layer/bias
~/sum sum ~/layer/linear
~/layer/linear_1 linear ~/layer/linear ~/layer/weight ~/layer/bias
~/blocks/0/relu relu ~/layer/linear_1
~/mul mul ~/blocks/0/relu ~/scale
~/constant Constant
~/add add ~/mul ~/constant
~/setitem setitem ~/add
~/chunk chunk ~/setitem
~/T T ~/chunk
~/contiguous contiguous ~/T
~/getitem getitem ~/contiguous
~/matmul matmul ~/chunk:1 ~/getitem
""",
    "Branched",
)


def train(run_dir: Path, model: Any = Branched, epochs: int = 1) -> quorate.Trainer:
    return fit(model, loss, ROWS, batch_size=8, shards=2, workers=2, run_dir=run_dir, epochs=epochs)


def events_of(run_dir: Path) -> list[Any]:
    files = sorted((run_dir / "summaries").glob("*tfevents*"))
    return [event for file in files for event in EventFileLoader(str(file)).Load()]


def shown(run_dir: Path) -> GraphDef:
    """Return the graph for TensorBoard's page, through TensorBoard's own plugin."""
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
    train(tmp_path / "run")
    graph = shown(tmp_path / "run")
    found = edges(graph)
    assert {n: e for n, e in found.items() if n.startswith(("batch", "Branched"))} == BRANCHED
    assert found["loss_function/cross_entropy"] == ("cross_entropy", ["Branched/matmul", "batch/1"])
    assert found["results/loss"] == ("Result", ["loss_function/cross_entropy"])
    assert found["results/size"] == ("Result", ["loss_function/mean"])
    # Of a shard: half of the 8 rows.
    assert shapes(graph, "batch/0") == [[4, 4]]
    assert shapes(graph, "Branched/chunk") == [[4, 2], [4, 2]]
    assert {node.device for node in graph.node if node.op != "Result"} == {"/device:CPU:0"}
    inputs = {name.partition(":")[0] for _, names in found.values() for name in names}
    assert inputs <= found.keys()  # or TensorBoard draws nothing


def test_a_run_has_one_graph_however_often_it_is_resumed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for epochs in (1, 2):
        train(run_dir, epochs=epochs)
    assert len([*(run_dir / "summaries").glob("*tfevents*")]) == 2
    assert [e.step for e in events_of(run_dir) if e.HasField("graph_def")] == [0]
    for file in (run_dir / "summaries").iterdir():  # without summaries a run writes the graph again
        file.unlink()
    train(run_dir, epochs=3)
    assert edges(shown(run_dir))["Branched/matmul"] == BRANCHED["Branched/matmul"]


SEEN: list[float] = []  # by a loss function: a global with a longer life than a shard


class Seen(quorate.Callback):
    before_training: list[float]

    def started(self, trainer: Any) -> None:
        self.before_training = list(SEEN)


def drawing_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    noise = random.random() + np.random.rand() + torch.rand(()).item()
    value = small.loss(model, batch)
    SEEN.append(value.item())
    return value * (1 + noise)


def test_nothing_depends_on_it(tmp_path: Path) -> None:
    ends = []
    for number, every_s in enumerate((None, None, 20.0)):  # the first of a process tries once more
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        SEEN.clear()
        seen = Seen()
        run = fit(
            small.Small, drawing_loss, small.DATA, optimizer=torch.optim.AdamW, ema_decay=0.9,
            workers=1, run_dir=tmp_path / f"{number}", summary_every_s=every_s, epochs=2,
            callbacks=[seen],
        )  # fmt: skip
        draws = random.random(), np.random.rand(), torch.rand(()).item()
        ends.append((digest_of(run), draws, seen.before_training))
    assert not (tmp_path / "1/summaries").exists()
    assert "Small/first/linear" in edges(shown(tmp_path / "2"))
    assert ends[1] == ends[2]
