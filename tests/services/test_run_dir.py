"""Unreadable, unwritable or unmovable parts of a run directory: one line, before step 1."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.disks import as_nobody, folder_of_nobody, tree
from support.messages import expect_error
from support.runs import inspected
from support.small import DATA, trainer

import quorate
from quorate.__main__ import main
from quorate.errors import SettingError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of steps 2 and 4, and logs of four steps."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    trainer(run_dir, save_every_steps=2).fit(DATA, steps=4)
    assert len(lines(run_dir)) == 4
    assert list((run_dir / "summaries").iterdir())
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def lines(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text().splitlines()


def require_resumed(run_dir: Path) -> None:
    again = trainer(run_dir, 1)
    again.fit(DATA, steps=6)
    assert again.global_step == 6
    assert len(lines(run_dir)) == 6


def but_the_lock(found: dict[str, bytes | str]) -> dict[str, bytes | str]:
    return {name: content for name, content in found.items() if name != "run.lock"}


class Calls(quorate.Callback):
    """Calls a function after an update, by the update's step."""

    def __init__(self, calls: dict[int, Callable[[], object]]) -> None:
        self.calls = calls

    def updated(self, report: quorate.Report) -> None:
        self.calls.get(report.global_step, lambda: None)()


# --- not seen -------------------------------------------------------------------------------------


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("disk") / path.name)


IN_ITS_PLACE: dict[str, Callable[[Path], object]] = {
    "dangling": dangling,
    "a file": lambda path: path.write_text("a file"),
    "a fifo": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def hide(path: Path, kind: str) -> Callable[[], None]:
    """Put a substitute in the place of a part of a run directory; return the undoing function."""
    away = path.with_name("not mounted")
    path.rename(away)
    IN_ITS_PLACE[kind](path)

    def back() -> None:
        path.unlink()
        away.rename(path)

    return back


@pytest.mark.parametrize("kind", IN_ITS_PLACE)
def test_checkpoints_that_cannot_be_seen_are_not_taken_for_none(
    kind: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    back = hide(run_dir / "checkpoints", kind)
    before = tree(run_dir)
    with expect_error(SettingError, name="run_dir") as caught:
        trainer(run_dir).fit(DATA, steps=6)
    sentence = str(caught.value)
    for attempt in (
        lambda: next(trainer(run_dir).updates(DATA, steps=6)),
        lambda: trainer(None, init_from=run_dir),
    ):
        with pytest.raises(SettingError) as caught:
            attempt()
        assert str(caught.value) == sentence
    capsys.readouterr()
    assert main(["inspect", str(run_dir)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert but_the_lock(tree(run_dir)) == but_the_lock(before)
    back()
    require_resumed(run_dir)


def test_logs_that_cannot_be_seen_are_not_begun_anew(run_dir: Path) -> None:
    for name, kind in (("metrics.jsonl", "a fifo"), ("summaries", "dangling")):
        back = hide(run_dir / name, kind)
        with expect_error(SettingError, name="run_dir"):
            trainer(run_dir).fit(DATA, steps=6)
        back()
    require_resumed(run_dir)


def test_a_run_directory_that_cannot_be_seen_is_refused_when_the_trainer_is_made(
    tmp_path: Path,
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name in ("link/run", "file", "circle"):
        with expect_error(SettingError, name="run_dir"):
            trainer(tmp_path / name)
        assert main(["inspect", str(tmp_path / name)]) == 2
    assert not (tmp_path / "nothing").exists()


# --- not read, not written ------------------------------------------------------------------------


@pytest.fixture
def of_nobody(trained: Path) -> Iterator[Path]:
    """Yield a copy of the run directory, owned by a user without special rights."""
    with folder_of_nobody() as folder:
        run_dir = Path(shutil.copytree(trained, folder / "run"))
        for path in (run_dir, *run_dir.rglob("*")):
            os.chown(path, folder.stat().st_uid, folder.stat().st_gid)
        yield run_dir


@pytest.mark.parametrize(
    ("folder", "mode"), [*(("checkpoints", mode) for mode in (0o000, 0o300, 0o500)), (".", 0o500)]
)
def test_what_modes_forbid_is_found_before_step_1(folder: str, mode: int, of_nobody: Path) -> None:
    before = tree(of_nobody)
    is_readable = mode & 0o500 == 0o500
    with as_nobody():
        made = trainer(of_nobody, 1)
        (of_nobody / folder).chmod(mode)
        with expect_error(SettingError, name="run_dir"):
            made.fit(DATA, steps=6)
        assert main(["inspect", str(of_nobody)]) == (0 if is_readable else 2)
        (of_nobody / folder).chmod(0o700)
    assert but_the_lock(tree(of_nobody)) == but_the_lock(before)
    with as_nobody():
        require_resumed(of_nobody)


def test_what_a_kill_left_half_written_is_removed(run_dir: Path) -> None:
    for folder in (run_dir, run_dir / "summaries", run_dir / "checkpoints"):
        (folder / ".quorate-0123456789abcdef").write_text("half of it")
        (folder / ".quorate-tried_ab").mkdir()
    (run_dir / ".quorate.mine").touch()
    require_resumed(run_dir)
    assert [name for name in tree(run_dir) if ".quorate-" in name] == []
    assert (run_dir / ".quorate.mine").exists()


# --- begun anew -----------------------------------------------------------------------------------


def test_logs_of_a_run_without_its_checkpoints_are_moved_aside_and_not_cut(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Remove the checkpoints, like an unmounted disk of checkpoints."""
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").mkdir()
    before = tree(run_dir)
    trainer(run_dir).fit(DATA, steps=2)
    assert f"moved the logs to {run_dir / 'aside-1'}," in capsys.readouterr().out
    logs = ("metrics", "events", "summaries", "status")
    assert tree(run_dir / "aside-1") == {
        name: data for name, data in before.items() if name.startswith(logs)
    }
    assert len(lines(run_dir)) == 2


# --- removed while a run trains -------------------------------------------------------------------


def test_a_directory_that_is_removed_is_said_once_and_saves_come_back_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, away = tmp_path / "run", tmp_path / "away"
    saved = []

    class Moving(Calls):
        def saved(self, global_step: int, path: Path) -> None:
            saved.append(global_step)

    moves = {3: lambda: run_dir.rename(away), 9: lambda: away.rename(run_dir)}
    made = trainer(run_dir, save_every_steps=1, keep=99)
    made.fit(DATA, steps=12, callbacks=[Moving(moves)])
    out = capsys.readouterr().out
    assert out.count("was not saved, training continues: [Errno 2] No such file") == 1
    assert out.count("was saved: checkpoints can be written again") == 1
    assert saved == [1, 2, 9, 10, 11, 12]
    assert len(lines(run_dir)) == 12  # the file went with the directory
    assert "metrics.jsonl cannot be written" not in out
    assert inspected(run_dir)["global_step"] == 12


# --- kept checkpoints -----------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "every_h"), [(3, None), (1, 1)])
def test_checkpoints_stay_by_their_number_and_by_the_hour(
    keep: int, every_h: int | None, tmp_path: Path
) -> None:
    """With ``every_h`` the first stays, and each so much later than the last kept checkpoint."""
    hours, stays, last = 0.0, set(), float("-inf")
    for step, gap in enumerate((0, 0.5, 0.5, 0.25, 2.5, 0, 0.75, 0.25, 0.25, 0.25), 1):
        hours += gap
        made = trainer(tmp_path, 1, keep=keep, keep_every_h=every_h, summary_every_s=None)
        made.fit(DATA, steps=step)
        if every_h is not None and hours >= last + every_h:
            last = hours
            stays.add(step)
        there = [one["global_step"] for one in inspected(tmp_path)["checkpoints"]]
        assert set(there) == stays | set(range(max(1, step - keep + 1), step + 1))
        newest = next((tmp_path / "checkpoints").glob(f"step-*{step:02}"))
        os.utime(newest / "complete", (1e9 + 3600 * hours, 1e9 + 3600 * hours))


# --- status.json ----------------------------------------------------------------------------------


def state(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, int | None, str]:
    """Return ``quorate runs``'s words on a run: state, step and why."""
    capsys.readouterr()
    assert main(["runs", "--json", str(run_dir)]) == 0
    [found] = json.loads(capsys.readouterr().out)
    return found["state"], found["global_step"], found["why"]


def test_a_run_goes_on_until_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Fails(quorate.Callback):
        def updated(self, report: quorate.Report) -> None:
            assert state(tmp_path, capsys)[0] == "running"
            raise ValueError("labels\nfrom 0")

    with pytest.raises(ValueError, match="labels"):
        trainer(tmp_path).fit(DATA, steps=2, callbacks=[Fails()])
    assert state(tmp_path, capsys) == ("failed", 1, "ValueError: labels\\nfrom 0")
    made = trainer(tmp_path)
    made.fit(DATA, steps=9, callbacks=[Calls({3: made.stop})])
    assert state(tmp_path, capsys)[:2] == ("stopped", 3)
    trainer(tmp_path).fit(DATA, steps=4)
    assert state(tmp_path, capsys)[:2] == ("finished", 4)


def test_what_nobody_wrote_is_no_status(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An impossible status is no status: the log and the checkpoints give the facts."""
    file = run_dir / "status.json"
    written = json.loads(file.read_text())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    running = written | {"state": "running"}
    assert state(run_dir, capsys)[0] == "finished"
    for record, expected in [
        (running | {"pid": os.getpid()}, "running"),
        (running | {"pid": gone.pid}, "killed"),
        (running | {"pid": os.getpid(), "born": 5.0}, "killed"),  # another process has the number
        (running | {"mark": "another", "host": "node-\x1b[2J7"}, "elsewhere"),
    ]:
        file.write_text(json.dumps(record))
        assert state(run_dir, capsys)[0] == expected
    assert state(run_dir, capsys)[2] == f"process {written['pid']} on node-\\x1b[2J7"
    file.unlink()
    without = state(run_dir, capsys)
    assert without[0] != "running"
    odd: list[dict[str, Any]] = [
        *({"state": "killed"}, {"global_step": -1}, {"last_step": 1 << 60}, {"at": "now"}),
        *({"state": "running", "pid": 1 << 70}, {"state": "running", "born": "x"}),
    ]
    texts = [json.dumps(written | changes) for changes in odd]
    for text in (*texts, "", "{", "[]", "[" * 100_000, '{"state": "running"}'):
        file.write_text(text)
        assert state(run_dir, capsys) == without, text[:200]
