"""``quorate report``: one run or two as an HTML page."""

import importlib.util
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from support import fits, runs
from support.messages import expect_message

from quorate.__main__ import main
from quorate.commands.report.run_history import read_updates

VOID = {"meta", "br", "img", "link", "input", "hr"}
AT = 1_700_000_000.0


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
        """Return all visible text, with single spaces."""
        return " ".join(" ".join(self.words).split())

    def of(self, tag: str, name: str) -> list[str]:
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


def spent(factor: float) -> dict[str, list[float]]:
    phases = ("starting", "waiting", "fetching", "forward", "backward", "pushing")
    columns = {phase: [factor * n, 0.0] for n, phase in enumerate(phases, start=1)}
    return {"shards": [round(10 * factor), 0], **columns}


def report(*run_dirs: Path, output: Path | None = None) -> Page:
    words = ["report", *map(str, run_dirs)]
    if output is not None:
        words += ["--output", str(output)]
    assert main(words) == 0
    page = Page((output or run_dirs[0] / "report.html").read_text())
    # Nothing from elsewhere, nothing executable, and unique ids.
    assert "://" not in page.source
    assert "@import" not in page.source
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
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


def fit(run_dir: Path, lr: float = 0.1) -> None:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=lr)

    settings = {"batch_size": 8, "shards": 2, "workers": 1, "run_dir": run_dir, "optimizer": sgd}
    fits.fit(data=fits.rows(32), steps=8, validation=fits.rows(8), **settings)


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
    kinds = [row[3] for row in page.rows if len(row) == 5]
    assert kinds[1:4] == ["start", "checkpoint saved", "end"]
    assert {"loss", "learning rate", "examples per second", "validation"} <= {*page.words}
    assert page.source.count("var(--accent)") > 3  # curves have the colours of the style sheet


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
    ours, theirs = (logged(run_dir)[0] for run_dir in (one, other))
    values = f"{ours[1]['loss']!r} (A) and {theirs[1]['loss']!r} (B)"
    assert f"The losses first differ at step 2: {values}" in page.text
    assert "Settings that differ: lr (group 0)" in page.text


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
    assert "d/loss: 3 of 3 values are not finite" in page.text
    assert "huge: 2 of 2 values are not finite" in page.text
    assert "損失" in page.words
    assert "no checkpoint yet" in page.text


def test_pauses_are_left_out_and_kills_are_marked(tmp_path: Path) -> None:
    """Workers' times are added up over both sessions."""
    night = 36_000.0
    first = [line(n, loss=1 / n) for n in range(2, 10)]
    second = [line(n, loss=1 / n, at=AT + night + n / 10) for n in range(12, 21)]
    write(
        tmp_path,
        line(1, loss=1.0, begun_at=AT, spent=spent(1)),
        *first,
        line(10, loss=0.1, spent=spent(2)),
        line(11, loss=0.1, at=AT + night + 1.1, begun_at=AT + night, spent=spent(0.5)),
        *second,
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
    [row] = [row for row in page.rows if len(row) == 10 and row[0] == "0"]
    assert row[1] == "25"
    assert row[4:] == ["2.50 s", "5.00 s", "7.50 s", "10.0 s", "12.5 s", "15.0 s"]
    # Each event is on the strip, and a pointer there shows its text.
    for text in ("worker 1 was killed", "worker 0 takes over", "resumed step 10", "beware"):
        assert re.search(rf"<title>[^<]*{text}", page.source)


def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = str(write(tmp_path / "run", line(1, loss=1.0)))
    find = importlib.util.find_spec
    for words in (
        *([], ["a", "b", "c"], [str(tmp_path / "nowhere")], [str(tmp_path)]),
        *([run_dir, "--output", "/nowhere/x.html"], [run_dir]),
    ):
        if words == [run_dir]:  # without matplotlib a line names the missing package
            monkeypatch.setattr(
                "quorate.commands.report.command.find_spec",
                lambda name: None if name == "matplotlib" else find(name),
            )
        assert main(["report", *words]) == 2
        expect_message(capsys.readouterr().err)
