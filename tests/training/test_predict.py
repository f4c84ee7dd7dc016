"""Predictions: every row once and in order, the same on any number of towers, as a plain loop."""

import importlib.util
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.messages import expect_error
from support.runs import TOWER, command, run_all
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import quorate
from quorate.errors import OutputError, SettingError, UserError
from quorate.training.outputs import in_memory

ROWS, BATCH, V = 46, 12, 4
DATA = TensorDataset(
    torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0)), torch.arange(ROWS) % 3
)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def trainer(workers: int = 1, **options: Any) -> quorate.Trainer:
    defaults: dict[str, Any] = {
        "optimizer": partial(torch.optim.Adam, lr=0.01),
        "batch_size": BATCH,
        "shards": V,
    }
    return quorate.Trainer(
        options.pop("model", net),
        options.pop("loss", loss),
        devices="cpu",
        workers=quorate.Workers(workers, engine="towers"),
        **defaults | options,
    )


def are_same(one: Any, other: Any) -> bool:
    """Compare outputs to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        is_alike = type(one) is type(other) and len(one) == len(other)
        return is_alike and all(map(are_same, one, other))
    return bool(one == other)


def everything(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
    """Outputs of all kinds: tensors of several dtypes, nested, and lists of any sizes."""
    x, y = batch
    logits = model(x)
    return {
        "logits": logits,
        "found": (logits.argmax(1), {"is_right": logits.argmax(1) == y, "none": None}),
        "boxes": [row[: int(n) + 1] for row, n in zip(x, y, strict=True)],
        "words": [f"row of {int(n)}" for n in y],
        "odd": [{"n": int(n), "x": row[:2]} for row, n in zip(x, y, strict=True)],
        "array": x.numpy() * 2,
    }


def by_shard(data: TensorDataset) -> list[list[torch.Tensor]]:
    """The shards of a plain loop: each batch is cut into V pieces."""
    found = []
    for start in range(0, ROWS, BATCH):
        b = min(BATCH, ROWS - start)
        cuts = [start + s * b // V for s in range(V + 1)]
        # Copies: the bits of a kernel may depend on where in memory rows begin.
        found += [[t.clone() for t in data[i:j]] for i, j in itertools.pairwise(cuts)]
    return found


def test_it_is_that_of_a_plain_loop() -> None:
    made = trainer(3)
    made.fit(DATA, epochs=1)
    found = made.predict(DATA, everything)
    with torch.no_grad():
        made.model.eval()
        plain = [everything(made.model, batch) for batch in by_shard(DATA)]
    assert torch.equal(found["logits"], torch.cat([each["logits"] for each in plain]))
    assert found["words"] == [word for each in plain for word in each["words"]]
    assert found["logits"].shape == (ROWS, 3)
    assert found["found"][1].keys() == {"is_right"}
    assert [len(box) for box in found["boxes"]] == [row % 3 + 1 for row in range(ROWS)]
    assert torch.equal(found["odd"][7]["x"], DATA.tensors[0][7, :2])
    assert torch.equal(found["array"], DATA.tensors[0] * 2)


def test_averaged_weights() -> None:
    optimize = quorate.Optimize(lambda params: torch.optim.SGD(params, lr=0.5), ema_decay=0.9)
    made = trainer(optimizer=optimize)
    made.fit(DATA, epochs=1)
    averaged = made.averaged_model
    assert averaged is not None
    with torch.no_grad():
        expected = torch.cat([averaged.eval()(batch[0]) for batch in by_shard(DATA)])
    assert torch.equal(made.predict(DATA), expected)
    assert not torch.equal(made.predict(DATA, averaged=False), expected)


def without_odd(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
    return {name: value for name, value in everything(model, batch).items() if name != "odd"}


def test_files_hold_the_same(tmp_path: Path) -> None:
    made = trainer(3)
    kept = made.predict(DATA, without_odd)
    folder = made.predict(DATA, without_odd, to=tmp_path / "new" / "out")
    assert folder == tmp_path / "new" / "out"
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
    for file, expected in {
        "logits": kept["logits"],
        "found.0": kept["found"][0],
        "found.1.is_right": kept["found"][1]["is_right"],
        "array": kept["array"],
        "boxes.values": torch.cat(kept["boxes"]),
        "boxes.shapes": torch.tensor([[len(box)] for box in kept["boxes"]]),
    }.items():
        array = np.load(folder / f"{file}.npy", mmap_mode="r")
        assert array.dtype == expected.numpy().dtype
        assert np.array_equal(array, expected.numpy()), file
    lines = (folder / "words.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == kept["words"]
    manifest = json.loads((folder / "prediction.json").read_text())
    assert (manifest["rows"], manifest["shards"], manifest["averaged"]) == (ROWS, V, False)
    assert manifest["outputs"]["boxes"] == ["boxes.values.npy", "boxes.shapes.npy"]
    # A prediction replaces an earlier prediction, as a whole, and nothing else.
    assert made.predict(DATA, to=folder) == folder
    assert sorted(path.name for path in folder.iterdir()) == ["output.npy", "prediction.json"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with expect_error(SettingError, name="to"):
        made.predict(DATA, to=tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_nothing_is_left_of_a_prediction_that_fails(tmp_path: Path) -> None:
    made = trainer(2)
    folder = made.predict(DATA, to=tmp_path / "out")
    before = (folder / "output.npy").read_bytes()

    def fails(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if (batch[0][:, 0] == DATA.tensors[0][30, 0]).any():
            raise ZeroDivisionError("row 30")
        return model(batch[0])

    with pytest.raises(ZeroDivisionError, match="row 30") as raised:
        made.predict(DATA, fails, to=folder)
    assert any("rows [" in note for note in raised.value.__notes__)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (folder / "output.npy").read_bytes() == before


class Inputs(Dataset[dict[str, torch.Tensor]]):
    """Rows with names, as from a tokenizer."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"a": torch.tensor([1.0 * row]), "b": torch.tensor([2.0])}


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b * self.w


def test_a_dict_is_keyword_arguments_and_labels_are_left_out() -> None:
    made = trainer(model=Named, loss=lambda m, b: m(**b).mean(), batch_size=4, shards=None)
    assert made.predict(Inputs()).flatten().tolist() == [2.0 * row for row in range(9)]
    pairs = TensorDataset(torch.ones(9, 1), torch.ones(9, 1))
    with expect_error(OutputError, name="predict"):
        made.predict(pairs)


MISTAKES: dict[str, Any] = {
    "mean": lambda m, b: m(b[0]).mean(),
    "parts": lambda m, b: [m(b[0]), b[1]],
    "object": lambda m, _: m,
    "sizes": lambda _, b: b[0][:, : int(b[1][0]) + 1],
    "names": lambda m, b: {"ab"[int(b[0][0, 0] > 0)]: m(b[0])},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    with expect_error(OutputError):
        trainer(2).predict(DATA, MISTAKES[mistake])


def test_what_files_do_not_have_is_named(tmp_path: Path) -> None:
    made = trainer()
    with expect_error(OutputError, name="predict: output.npy"):
        made.predict(DATA, lambda m, b: m(b[0]).bfloat16(), to=tmp_path / "out")
    with expect_error(UserError, name="predict", got="str"):
        made.predict(DATA, "logits")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def told(model: nn.Module, batch: list[torch.Tensor], at: Any) -> torch.Tensor:
    return loss(model, batch) * (1 + at.progress)


def test_a_loss_that_is_told_where_it_is_is_not_what_predicts() -> None:
    made = trainer(2, loss=told)
    for _ in made.updates(DATA, steps=2):  # by the workers of a loop under way
        assert made.predict(DATA, lambda m, b: m(b[0])).shape == (ROWS, 3)
    with expect_error(OutputError, name="predict", got="a function with the argument at"):
        made.predict(DATA, told)


# --- by worker processes, ranks and a Ray cluster -------------------------------------------------

RUNS = {
    "tower": TOWER,
    "processes": ("--engine", "processes", "--workers", "2"),
    "ranks": ("--engine", "collective", "--workers", "2"),
}
if importlib.util.find_spec("ray") is not None:
    RUNS["ray"] = ("--engine", "ray", "--workers", "2")


@pytest.mark.slow
def test_the_same_on_all_engines_and_with_a_kill(tmp_path: Path) -> None:
    """Predict outputs of all kinds, before the first loop of a script, inside and afterwards."""
    commands = {}
    for name, options in RUNS.items():
        (kept := tmp_path / name).mkdir()
        words = ["steps=4", "then=predicts", f"kept={kept}"]
        if name == "processes":
            words += ["what=KILL", "at=predicting,1,30", f"folder={kept}", "size=3"]
        commands[name] = command("ranks.py", *words, options=options)
    ended = run_all(commands)
    assert [(name, each.said) for name, each in ended.items() if each.code] == []
    expected = {file.name: torch.load(file) for file in (tmp_path / "tower").glob("*.pt")}
    assert len(expected) == 4
    for name in RUNS:
        found = {file.name: torch.load(file) for file in (tmp_path / name).glob("*.pt")}
        assert are_same(found, expected), name
    assert (tmp_path / "processes" / "happened").exists()
    assert "killed by signal 9" in ended["processes"].said


def test_items_of_lists_are_in_memory_of_their_own() -> None:
    """Copy items: they share no memory with the arriving message, or with their maker."""
    sink, parcel = in_memory(2), torch.zeros(2, 3)
    sink.put([{"row": row} for row in parcel], 2)
    parcel.fill_(1.0)
    assert [item["row"].tolist() for item in sink.finish({})] == [[0.0] * 3] * 2
