"""Rows that are sampled, or come of a loader or a stream: on any engine, killed, and resumed."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import os
import random
import signal
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.runs import LIMIT_S, command, digests, last_json, run, run_all, started

KINDS = ("sampled", "loader", "lines", "stream")
HUGGING_FACE = ("hf-json", "hf-csv", "hf-parquet")  # of its streaming data sets
UPDATES = 14  # in the third or fourth epoch


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Hugging Face's datasets ask nobody, and leave nothing behind."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hugging-face"))


def lines(folder: Path) -> Path:
    """Write five files of 70 to 74 lines."""
    folder.mkdir()
    row = 0
    for number in range(5):
        rows = range(row, row + 70 + number)
        (folder / f"{number}.jsonl").write_text("".join(f"{row}\n" for row in rows))
        row = rows.stop
    return folder


def parts(folder: Path, kind: str) -> Path:
    """Write the same rows as Hugging Face's loaders of JSON, CSV or Parquet expect them."""
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("datasets is not installed")
    folder.mkdir()
    row = 0
    for number in range(5):
        rows = [{"row": row + n, "text": f"line {row + n}"} for n in range(70 + number)]
        path = folder / f"part-{number}"
        if kind == "hf-json":
            path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        elif kind == "hf-csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, ["row", "text"])
                writer.writeheader()
                writer.writerows(rows)
        else:
            table = importlib.import_module("pyarrow").Table.from_pylist(rows)
            importlib.import_module("pyarrow.parquet").write_table(table, path, row_group_size=16)
        row += len(rows)
    return folder


def files_of(kind: str, folder: Path) -> Path:
    return parts(folder, kind) if kind in HUGGING_FACE else lines(folder)


def tars(folder: Path, rows: int, files: int) -> Path:
    """Write files of as many rows, of two members each."""
    folder.mkdir()
    each = rows // files
    for number in range(files):
        with tarfile.open(folder / f"{number:02d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for row in range(number * each, (number + 1) * each):
                for kind, content in (("row", str(row).encode()), ("also", b"x" * (row % 50))):
                    info = tarfile.TarInfo(f"{row:06d}.{kind}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return folder


def fed(
    kind: str, folder: Path, steps: int, engine: str, workers: int, pace_s: float = 0.0, **more: Any
) -> list[str]:
    options = ("--engine", engine, "--workers", str(workers))
    for name, value in more.items():
        options += (f"--{name.replace('_', '-')}", str(value))
    return command("fed.py", kind, str(folder), str(steps), str(pace_s), options=options)


def found(words: Mapping[str, list[str]]) -> dict[str, Any]:
    """Run scripts, and return what each printed last."""
    ended = run_all(words)
    for one in ended.values():
        assert one.code == 0, one.said
    return {name: last_json(one.out) for name, one in ended.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, HUGGING_FACE[0]])
def test_rows_are_the_same_on_every_engine(tmp_path: Path, kind: str) -> None:
    ways = [("towers", 1), ("towers", 3), ("processes", 2), ("collective", 2)]
    folders = {way: files_of(kind, tmp_path / f"{way[0]}-{way[1]}") for way in ways}
    results = found(
        {str(way): fed(kind, folders[way], UPDATES, *way) for way in ways}
        | {
            "loading": fed(
                kind,
                files_of(kind, tmp_path / "loading"),
                UPDATES,
                "processes",
                2,
                loader_workers=2,
            )
        }
    )
    # Digest, validation (of a loader with another collate function) and length of an epoch.
    assert len({json.dumps(result) for result in results.values()}) == 1, results


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")
@pytest.mark.parametrize("kind", [*KINDS, *HUGGING_FACE])
def test_a_run_that_is_killed_in_an_epoch_ends_elsewhere_with_the_same_bits(
    tmp_path: Path, kind: str
) -> None:
    """On three processes, all of which end with the coordinator; then on two, then on one tower."""
    folder, run_dir = files_of(kind, tmp_path / "rows"), tmp_path / "run"
    whole = found({"whole": fed(kind, folder, UPDATES, "towers", 1)})["whole"]
    options = {"run_dir": run_dir, "save_every_steps": 1}
    words = fed(kind, folder, UPDATES, "processes", 3, 0.3, **options)
    with started(tmp_path, words) as (process, _):
        until = time.monotonic() + LIMIT_S
        # In the middle of an epoch.
        while len(list(run_dir.glob("checkpoints/step-*/complete"))) < 2:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    after = run(fed(kind, folder, 8, "processes", 2, **options))
    assert after.code == 0, after.said
    assert "resumed step" in after.said
    assert last_json(after.out)["digest"] != whole["digest"]
    last = run(fed(kind, folder, UPDATES, "towers", 1, **options))
    assert last.code == 0, last.said
    assert "resumed step 8 " in last.said
    assert last_json(last.out)["digest"] == whole["digest"]


@pytest.mark.slow
def test_a_hundred_thousand_rows_of_tar_files_resumed_ten_times(tmp_path: Path) -> None:
    """At random steps, each time on another number of workers: each row is once in each epoch."""
    rows, epochs = 100_000, 2
    folder = tars(tmp_path / "tars", rows, files=20)
    per_epoch = rows // 2000
    chance = random.Random(4)
    stops = sorted(chance.sample(range(1, epochs * per_epoch), 10))
    ways = [("processes", 2), ("towers", 3), ("processes", 3), ("towers", 1), ("collective", 2)]
    run_dir = tmp_path / "run"
    for number, steps in enumerate([*stops, epochs * per_epoch]):
        words = fed("tar", folder, steps, *ways[number % len(ways)], run_dir=run_dir)
        ended = run(words)
        assert ended.code == 0, ended.said
        assert ("resumed step" in ended.said) == (number > 0), ended.said
        assert last_json(ended.out)["per_epoch"] == per_epoch
    for epoch in range(epochs):
        seen = np.load(folder / f"seen-{epoch}.npy")
        assert seen.shape == (rows,)
        assert (seen == 1).all(), np.flatnonzero(seen != 1)[:10]
        (folder / f"seen-{epoch}.npy").unlink()
    whole = found(
        {"whole": fed("tar", folder, epochs * per_epoch, "towers", 2, run_dir=tmp_path / "whole")}
    )
    assert digests(tmp_path / "whole") == digests(run_dir)
    assert whole["whole"]["digest"] == digests(run_dir)[0]
