"""What is shown of an exception that ends the program: the user's frames, ours folded; one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from support.runs import Ended, run
from support.small import DATA, Small

import quorate
from quorate import errors
from quorate.errors import ExitError, SettingError, UserError, cut, shown
from quorate.services.display import uncaught
from quorate.services.display.uncaught import folded


def raised(work: Callable[[], object]) -> BaseException:
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def failing(model: torch.nn.Module, batch: object) -> torch.Tensor:
    try:
        raise KeyError("a key")
    except KeyError as error:
        raise ValueError("a value") from error


def test_the_users_frames_are_first_and_last() -> None:
    sgd = partial(torch.optim.SGD, lr=0.1)
    trainer = quorate.Trainer(Small, failing, optimizer=sgd, batch_size=12, devices="cpu")
    error = raised(lambda: trainer.fit(DATA))
    lines = "".join(folded(error)).splitlines()
    begin = lines.index("Traceback (most recent call last):", 1)
    files = [line.split(", ")[0] for line in lines[begin:] if line.startswith("  File ")]
    assert set(files) == {f'  File "{__file__}"'}
    folds = [line for line in lines[begin:] if "QUORATE_TRACEBACK=full shows all" in line]
    assert len(folds) == 1
    assert "frames of quorate" in folds[0]
    assert "KeyError: 'a key'" in lines
    assert lines[-2] == "ValueError: a value"
    assert lines[-1].startswith("quorate: while trying shard 0 of step 0, rows [")
    package = f"{Path(quorate.__file__).parent}/"  # a clone's folder may have that name too
    assert not any(package in line for line in lines)


def test_a_fault_of_ours_keeps_its_frames() -> None:
    error = raised(lambda: uncaught._hidden(5, is_ours=False))  # type: ignore[arg-type]
    text = "".join(folded(error))
    assert "uncaught.py" in text
    assert "QUORATE_TRACEBACK" not in text


def test_a_long_message_is_cut_and_says_by_how_much() -> None:
    error = raised(lambda: failing_with("x" * 50_000_000))
    error.add_note("y" * 1_000_000)
    text = "".join(folded(error))
    assert len(text) < 30_000
    assert "(49,990,013 characters are left out)" in text
    assert len(cut("z" * 1_000_000)) < 11_000
    assert cut("z" * 10_000) == "z" * 10_000


def failing_with(text: str) -> None:
    raise ValueError(text)


def test_a_value_is_shown_in_one_line_and_not_whole() -> None:
    class Unprintable:
        def __repr__(self) -> str:
            raise RuntimeError("mine")

    assert shown(list(range(100_000))).endswith("characters more)")
    assert shown(torch.zeros(3, 3)).count("\n") == 0
    assert shown(Unprintable()) == "<Unprintable, whose repr raised RuntimeError>"
    assert len(str(SettingError("shards", "x" * 10**6, "less", "choose"))) < 300


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError("mine\nis bad"), 2), (ExitError("left", 7), 7), (errors.NotFiniteError("no"), 1)],
)
def test_one_line_and_its_exit_code(
    error: errors.OneLineError,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(errors, "_shown_before", None)
    monkeypatch.setattr(uncaught, "_shown_before", None)
    uncaught.fold_tracebacks()
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(type(error), error, None)
    assert ended.value.code == code
    assert capsys.readouterr().err == f"quorate: {' '.join(str(error).splitlines())}\n"


def test_whoever_shows_exceptions_in_another_way_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    monkeypatch.setattr(errors, "_shown_before", None)
    monkeypatch.setattr(uncaught, "_shown_before", None)
    uncaught.fold_tracebacks()
    mine, theirs = UserError("a mistake"), ValueError("a value")
    sys.excepthook(ValueError, theirs, None)
    with pytest.raises(SystemExit):
        sys.excepthook(UserError, mine, None)
    assert seen == [theirs, mine]


SCRIPT = """
import sys, torch, quorate
from torch.utils.data import TensorDataset
what = sys.argv[2]
if what == "group":
    quorate.Workers(count=-1)
def loss(model, batch):
    step = int(batch[0].min()) // 8
    out = model(batch[0]).square()
    if step == 3 and what.startswith("exit"):
        sys.exit(int(what[4:]))
    if step == 3 and what == "raise":
        raise ValueError("mine")
    return out if what == "vector" else out.mean() * (float("nan") if what == "nan" else 1.0)
trainer = quorate.Trainer(torch.nn.Linear(1, 1), loss, batch_size=8, shards=2, devices="cpu",
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
    workers=quorate.Workers(2, engine=sys.argv[1]))
trainer.fit(TensorDataset(torch.arange(80.0)[:, None]), shuffle=False)
"""


def plain(tmp_path: Path, *arguments: str, **variables: str) -> Ended:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return run([sys.executable, str(script), *arguments], env=variables)


def test_a_mistake_in_a_plain_script_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    ended = plain(tmp_path, "towers", "vector")
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith("quorate: loss: got a tensor of shape ")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["towers", "processes"])
@pytest.mark.parametrize(("what", "code"), [("exit0", 1), ("exit3", 3)])
def test_sys_exit_in_a_loss_is_an_error(tmp_path: Path, engine: str, what: str, code: int) -> None:
    ended = plain(tmp_path, engine, what)
    assert ended.code == code
    (line,) = ended.err.splitlines()
    assert line.startswith(f"quorate: sys.exit({what[4:]}) was called by the code that computes a ")
    assert "step 3, shard " in line


@pytest.mark.slow
def test_a_plain_script_ends_as_quorate_run_does(tmp_path: Path) -> None:
    group = plain(tmp_path, "towers", "group")
    assert group.code == 2
    assert (
        group.err == "quorate: workers: got -1, expected a whole number >= 1 and <= 4096; choose a "
        "larger one\n"
    )
    not_finite = plain(tmp_path, "towers", "nan")
    assert not_finite.code == 1
    assert len(not_finite.err.splitlines()) == 1
    assert "is not finite in step 0" in not_finite.err


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["towers", "processes"])
def test_a_traceback_is_short_unless_it_is_wanted_in_full(tmp_path: Path, engine: str) -> None:
    ended = plain(tmp_path, engine, "raise")
    assert ended.code == 1
    lines = ended.err.splitlines()
    assert len(lines) < 12, ended.err
    assert lines[1].endswith('train.py", line 18, in <module>')
    assert any(line.endswith(", in loss") for line in lines)
    assert lines[-2] == "ValueError: mine"
    full = plain(tmp_path, engine, "raise", QUORATE_TRACEBACK="full")
    assert full.code == 1
    assert full.err.count(f"{Path(quorate.__file__).parent}/") > 10
