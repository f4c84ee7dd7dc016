"""``quorate report``: one run or two as an HTML page."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib import font_manager
from support import runs
from torch.utils.data import TensorDataset

import quorate
from quorate.commands.main import main
from quorate.commands.report.charts import decimated, running_mean
from quorate.commands.report.page import duration
from quorate.commands.report.run_history import read_updates

VOID = {"meta", "br", "img", "link", "input", "hr"}
AT = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _no_fonts_left() -> Iterator[None]:
    """Fonts are files that matplotlib keeps open."""
    yield
    font_manager._get_font.cache_clear()


class Page(HTMLParser):
    """A page, taken apart; every element must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source = text
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []  # of all tables: cells
        self._in_cell = False
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        """All that a reader sees, with single spaces."""
        return " ".join(" ".join(self.words).split())

    def of(self, tag: str, name: str) -> list[str]:
        """Return an attribute of all elements of a kind that have it."""
        return [value for t, attrs in self.tags if t == tag and (value := attrs.get(name))]


def line(step: int, **more: Any) -> str:
    fields = {"epoch": 0, "rows": 64, "lr": 0.1, "examples_per_s": 100.0, "fresh": [1, 1]}
    return json.dumps({"global_step": step, **fields, "at": AT + step / 10, **more})


def write(run_dir: Path, *lines: str, name: str = "metrics.jsonl") -> Path:
    run_dir.mkdir(exist_ok=True)
    (run_dir / name).write_text("".join(f"{each}\n" for each in lines))
    return run_dir


def event(kind: str, seconds: float, text: str = "", **more: Any) -> str:
    return json.dumps({"at": AT + seconds, "global_step": 1, "kind": kind, "text": text, **more})


def report(*run_dirs: Path, output: Path | None = None) -> Page:
    words = ["report", *map(str, run_dirs)]
    if output is not None:
        words += ["--output", str(output)]
    assert main(words) == 0
    page = Page((output or run_dirs[0] / "report.html").read_text())
    # Nothing from elsewhere, nothing that runs, ids that are there once.
    assert "://" not in page.source
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert "@import" not in page.source
    assert not re.search(r"url\((?!#)", page.source)
    links = [*page.of("a", "href"), *page.of("use", "href")]
    ids = [value for _, attrs in page.tags if (value := attrs.get("id"))]
    assert len(ids) == len({*ids})
    assert {link.removeprefix("#") for link in links} <= {*ids}
    assert all(link.startswith("#") for link in links)
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    for svg in re.findall(r"<svg.*?</svg>", page.source, flags=re.DOTALL):
        ElementTree.fromstring(svg)
    return page


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["report", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def fit(run_dir: Path, seed: int = 0, lr: float = 0.1) -> None:
    rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    quorate.Trainer(
        lambda: torch.nn.Linear(4, 1),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        batch_size=8,
        shards=2,
        workers=1,
        devices="cpu",
        seed=seed,
        run_dir=run_dir,
    ).fit(TensorDataset(rows), steps=8, validation=TensorDataset(rows[:8]))


def logged(run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the updates and the evaluations of a run."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    updates = [each for each in lines if "validation" not in each]
    return updates, [each for each in lines if "validation" in each]


def test_a_page_says_what_the_files_say(tmp_path: Path) -> None:
    fit(tmp_path)
    page = report(tmp_path)
    updates, evaluations = logged(tmp_path)
    digest, _ = runs.digests(tmp_path)
    assert f"last loss {updates[-1]['loss']:.4g}" in page.text
    assert f"validation loss {evaluations[-1]['validation']['loss']:.4g} step 8" in page.text
    assert f"{digest} at step 8" in page.text
    assert "updates 8 of 8" in page.text
    assert "same bits yes" in page.text
    cells = {row[0]: row[1] for row in page.rows if len(row) == 2}
    assert (cells["batch_size"], cells["shards"], cells["lr (group 0)"]) == ("8", "2", "0.1")
    assert cells["processor"].split(";")[0]
    assert [row[3] for row in page.rows if len(row) == 5][1:4] == [
        "start",
        "checkpoint saved",
        "end",
    ]
    assert {"loss", "learning rate", "examples per second", "validation"} <= {*page.words}
    assert page.source.count("var(--accent)") > 3  # curves have the colours of the style sheet
    assert "prefers-color-scheme: dark" in page.source


def test_two_runs_of_equal_and_of_other_weights(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    fit(one)
    fit(same)
    fit(other, lr=0.05)
    page = report(one, same, output=tmp_path / "same.html")
    assert "The weights are equal" in page.text
    assert "All 8 losses that both runs have are equal" in page.text
    assert "All settings are equal" in page.text
    page = report(one, other)
    assert (one / "report.html").exists()
    assert "The weights differ" in page.text
    assert runs.digests(one)[0] in page.text
    assert runs.digests(other)[0] in page.text
    ours, theirs = (logged(run_dir)[0] for run_dir in (one, other))
    step = next(
        a["global_step"] for a, b in zip(ours, theirs, strict=True) if a["loss"] != b["loss"]
    )
    assert step == 2  # the first update is of equal weights
    values = f"{ours[1]['loss']!r} (A) and {theirs[1]['loss']!r} (B)"
    assert f"The losses first differ at step 2: {values}" in page.text
    assert "Settings that differ: lr (group 0)" in page.text
    assert ["lr (group 0)", "0.1", "0.05"] in page.rows


def test_runs_of_other_steps_are_compared_where_both_have_some(tmp_path: Path) -> None:
    a = write(tmp_path / "a", *(line(n, loss=1.0, lr=0.1) for n in range(1, 9)))
    b = write(tmp_path / "b", *(line(n, loss=1.0 if n < 12 else 2.0) for n in range(6, 15)))
    page = report(a, b)
    assert "The losses are equal" in page.text
    assert "All 3 losses" in page.text
    c = write(tmp_path / "c", line(50, loss=1.0))
    assert "Two runs without a common update" in report(a, c).text


def test_what_comes_from_files_is_no_html(tmp_path: Path) -> None:
    evil = "<script>alert(1)<b onclick=x>\"'&"
    run_dir = write(
        tmp_path / "<script>alert(2)",
        line(1, **{evil: 0.5, "loss": 1.0, "$\\frac{": 2.0}),
        json.dumps({"global_step": 1, "validation": {evil: 1.0}}),
    )
    start = event("start", 0, evil, command=[f"/x/{evil}"], settings={evil: evil, "devices": 5})
    write(run_dir, start, event(evil, 1, evil), event("lost", 2, evil), name="events.jsonl")
    page = report(run_dir)
    assert page.text.count("<script>alert(1)<b onclick=x>") >= 5
    assert "<script>alert(2)" in page.text
    assert "<script" not in page.source


@pytest.mark.parametrize(
    ("lines", "steps", "damaged"),
    [
        ([], [], 0),
        ([line(1, loss=1.0), line(2, loss=0.5)[:-20]], [1], 0),  # torn by a kill
        ([line(1, loss=1.0)[:-20], line(2, loss=0.5)], [2], 1),
        (["[]", "5", "{}", '{"global_step": -1}', line(1, loss=1.0)], [1], 4),
        (["\0" * 100, "[" * 10_000, "\udcff", line(1, loss=1.0)], [1], 3),
        ([line(1, loss=1.0, at="x", begun_at=-1, spent=[], fresh="x")], [1], 0),
        ([line(3, loss=1.0), line(2, loss=1.0), line(3, loss=2.0)], [3, 2, 3], 0),
        ([line(1), '{"global_step": 1, "validation": 5}'], [1], 1),
    ],
)
def test_logs_that_are_cut_off_or_odd(
    tmp_path: Path, lines: list[str], steps: list[int], damaged: int
) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    updates = read_updates(log)
    assert [*updates.steps] == steps
    assert updates.damaged == damaged


def test_a_page_of_values_that_are_no_numbers_and_of_phases(tmp_path: Path) -> None:
    write(
        tmp_path,
        "[]",
        line(1, **{"d/loss": "NaN", "phase": "d", "損失": 2.0}),
        line(2, **{"g/loss": 3.0, "huge": 1e308, "grad_norm": "Infinity"}),
        line(3, **{"d/loss": math.nan, "huge": -1e308, "at": "x"}),
        json.dumps({"global_step": 3, "validation": {"d/loss": "NaN"}}),
    )
    page = report(tmp_path)
    assert "1 damaged line is left out" in page.text
    assert "last d/loss NaN" in page.text
    assert "last g/loss 3" in page.text
    assert "d/loss: 3 of 3 values are not finite" in page.text
    assert "huge: 2 of 2 values are not finite" in page.text
    assert "損失" in page.words
    assert "no checkpoint yet" in page.text


def test_a_run_without_an_update_has_a_page(tmp_path: Path) -> None:
    assert "No update was logged yet" in report(write(tmp_path, "", name="run.lock")).text


def test_pauses_are_left_out_and_kills_are_marked(tmp_path: Path) -> None:
    night = 36_000.0
    write(
        tmp_path,
        *(line(n, loss=1 / n, **({"begun_at": AT} if n == 1 else {})) for n in range(1, 11)),
        *(
            line(
                n,
                loss=1 / n,
                at=AT + night + n / 10,
                **({"begun_at": AT + night} if n == 11 else {}),
            )
            for n in range(11, 21)
        ),
    )
    write(
        tmp_path,
        event("start", 0.0, "training starts"),
        event("lost", 0.5, "worker 1 was killed", worker=1),
        event("takeover", 0.6, "worker 0 takes over"),
        event("back", 0.7, "worker 1 is back", worker=1),
        event("start", night, "training starts"),
        event("resume", night + 0.1, "resumed step 10"),
        event("warning", night + 0.2, "beware"),
        event("end", night + 2, "finished: all", state="finished"),
        name="events.jsonl",
    )
    page = report(tmp_path)
    assert "training time 3.00 s in 2 sessions" in page.text
    assert "workers lost 1 run killed 1 time" in page.text
    kinds = {row[3]: row[1] for row in page.rows if len(row) == 5}
    assert kinds["worker lost"] == "0.50 s"
    assert kinds["takeover"] == "0.60 s"
    assert kinds["worker restarted"] == "0.70 s"
    assert kinds["run killed"] == "1.00 s"
    assert kinds["resume"] == "1.10 s"
    assert kinds["warning"] == "1.20 s"
    # Each is on the strip, and a pointer there shows what it was.
    for text in ("worker 1 was killed", "worker 0 takes over", "resumed step 10", "beware"):
        assert re.search(rf"<title>[^<]*{text}", page.source)


@pytest.mark.slow
def test_what_the_workers_time_went_into_is_added_up_over_sessions(tmp_path: Path) -> None:
    phases = ("starting", "waiting", "fetching", "forward", "backward", "pushing")

    def spent(factor: float) -> dict[str, list[float]]:
        columns = {phase: [factor * n, 0.0] for n, phase in enumerate(phases, start=1)}
        return {"shards": [round(10 * factor), 0], **columns}

    write(
        tmp_path,
        line(1, loss=1.0, begun_at=AT, spent=spent(1)),
        line(2, loss=1.0, spent=spent(2)),
        line(3, loss=1.0, begun_at=AT + 0.25, spent=spent(0.5)),
    )
    page = report(tmp_path)
    [row] = [row for row in page.rows if len(row) == 10 and row[0] == "0"]
    assert row[1] == "25"
    assert row[4:] == [duration(2.5 * n) for n in range(1, 7)]


@pytest.mark.slow
def test_a_long_log_is_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    draw = random.Random(0)
    peak = 5_432
    write(
        tmp_path,
        *(line(n, loss=50.0 if n == peak else draw.random()) for n in range(1, 20_001)),
    )
    write(
        tmp_path, *(event("save", n / 10, f"saved {n}") for n in range(2_000)), name="events.jsonl"
    )
    page = report(tmp_path)
    assert "The curves have 20,000 updates" in page.text
    assert "events between the first 200 and the last 200 are left out" in page.text
    assert len(page.source) < 1_000_000


def test_thinned_curves_keep_their_peaks_and_gaps() -> None:
    x = np.arange(10_000.0)
    y = np.sin(x)
    y[4_321], y[7_000:7_200] = 100.0, np.nan
    thin_x, thin_y = decimated(x, y, 200)
    assert len(thin_y) <= 200
    assert thin_y[np.nanargmax(thin_y)] == 100.0
    assert thin_x[np.nanargmax(thin_y)] == 4_321
    assert np.isnan(thin_y).any()
    assert (np.diff(thin_x) > 0).all()
    means = running_mean(np.array([1.0, np.nan, 3.0, 5.0]), 2)
    assert means.tolist() == [1.0, 1.0, 3.0, 4.0]


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    fit(tmp_path)
    newest = tmp_path / "checkpoints" / "step-000000000008"
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    page = report(tmp_path)
    assert "no sound checkpoint" in page.text
    assert "got SHA-256" not in page.text


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write(tmp_path / "run", line(1, loss=1.0))
    assert "RUN_DIR: got None, expected one run directory" in refused(capsys)
    assert "two to compare" in refused(capsys, "a", "b", "c")
    assert "No such file" in refused(capsys, str(tmp_path / "nowhere"))
    assert "expected a run directory" in refused(capsys, str(tmp_path))
    assert "Not a directory" in refused(capsys, str(run_dir / "metrics.jsonl"))
    assert "output: got" in refused(capsys, str(run_dir), "--output", str(tmp_path))
    assert "make the folder first" in refused(capsys, str(run_dir), "--output", "/nowhere/x.html")


def test_without_matplotlib_a_line_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        "quorate.commands.report.command.find_spec",
        lambda name: None if name == "matplotlib" else find(name),
    )
    run_dir = write(tmp_path / "run", line(1, loss=1.0))
    assert "pip install 'quorate-torch[report]'" in refused(capsys, str(run_dir))


def test_files_that_block_or_have_no_end_are_left_alone(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run")
    (run_dir / "metrics.jsonl").unlink()
    os.mkfifo(run_dir / "metrics.jsonl")
    (run_dir / "events.jsonl").symlink_to("/dev/zero")
    assert "No update was logged yet" in report(run_dir).text


def test_a_log_with_old_and_new_lines_is_read(tmp_path: Path) -> None:
    write(tmp_path, '{"global_step": 1, "loss": NaN}', '{"global_step": 2, "loss": 1}')
    updates = read_updates(tmp_path / "metrics.jsonl")
    assert math.isnan(updates.curves["loss"].values[0])
    assert updates.curves["loss"].values[1] == 1.0
    assert updates.at.tolist() != updates.at.tolist()  # nan: no time is known


@pytest.mark.slow
def test_the_page_of_a_run_with_a_kill_a_resume_and_a_validation(tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    options = ("--workers", "2", "--run-dir", str(run_dir), "--save-every-steps", "10")
    words = runs.command("reported.py", "60", "15", "35", options=options)
    assert runs.run(words).code == -signal.SIGKILL
    ended = runs.run(words)
    assert ended.code == 0, ended.said
    undisturbed = tmp_path / "undisturbed"
    options = ("--workers", "1", "--run-dir", str(undisturbed))
    assert runs.run(runs.command("reported.py", "60", "0", "0", options=options)).code == 0

    page = report(run_dir)
    kinds = {row[3] for row in page.rows if len(row) == 5}
    assert kinds >= {
        *("start", "worker lost", "takeover", "worker restarted", "checkpoint saved"),
        *("run killed", "resume", "validation", "end"),
    }
    assert "was killed by signal 9 (SIGKILL)" in page.text
    assert "in 2 sessions" in page.text
    updates, evaluations = logged(run_dir)
    assert [each["global_step"] for each in updates] == [*range(1, 61)]
    assert f"last loss {updates[-1]['loss']:.4g}" in page.text
    assert f"validation loss {evaluations[-1]['validation']['loss']:.4g}" in page.text
    assert runs.digests(run_dir)[0] in page.text
    assert len(page.source.encode()) < 2_000_000
    lost = {row[0]: row[2] for row in page.rows if len(row) == 10}
    assert (lost["0"], lost["1"]) == ("0", "1")

    page = report(run_dir, undisturbed, output=tmp_path / "both.html")
    assert "The weights are equal" in page.text
    assert "All 60 losses that both runs have are equal" in page.text
    assert "workers" in page.text.partition("Settings that differ: ")[2].split(".")[0]
