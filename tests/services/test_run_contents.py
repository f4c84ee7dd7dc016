"""What of a run directory cannot be seen or written is found before step 1, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.disks import as_nobody, disk, fill, folder_of_nobody, remount, tree
from support.messages import expect_error
from support.runs import command, run
from support.small import DATA, trainer

import quorate
from quorate.commands.main import main
from quorate.errors import CheckpointError, SettingError
from quorate.services.checkpoints import files
from quorate.services.report import Report
from quorate.services.run_contents import require_seen, require_usable


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
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def lines(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text().splitlines()


def resumed(run_dir: Path) -> None:
    """Hold that a run goes on in a directory."""
    again = trainer(run_dir)
    again.fit(DATA, steps=6)
    assert again.global_step == 6
    assert len(lines(run_dir)) == 6


# --- not seen -------------------------------------------------------------------------------------


def dangling(path: Path) -> Callable[[], None]:
    away = path.with_name("not mounted")
    path.rename(away)
    path.symlink_to(path.with_name("disk") / path.name)

    def back() -> None:
        path.unlink()
        away.rename(path)

    return back


def circular(path: Path) -> Callable[[], None]:
    back = dangling(path)
    path.unlink()
    path.symlink_to(path)
    return back


def replaced(path: Path) -> Callable[[], None]:
    back = dangling(path)
    path.unlink()
    path.write_text("a file")
    return back


def fifo(path: Path) -> Callable[[], None]:
    back = dangling(path)
    path.unlink()
    os.mkfifo(path)
    return back


def device(path: Path) -> Callable[[], None]:
    back = dangling(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    return back


def bound(path: Path) -> Callable[[], None]:
    back = dangling(path)
    path.unlink()
    folder = os.getcwd()  # noqa: PTH109
    os.chdir(path.parent)  # a socket's path is 108 bytes at most
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path.name)
    os.chdir(folder)
    return back


@pytest.mark.parametrize("hidden", [dangling, circular, replaced, fifo, device, bound])
def test_checkpoints_that_cannot_be_seen_are_not_taken_for_none(
    hidden: Callable[[Path], Callable[[], None]], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    back = hidden(run_dir / "checkpoints")
    before = tree(run_dir)
    for attempt in (
        lambda: trainer(run_dir).fit(DATA, steps=6),
        lambda: next(trainer(run_dir).updates(DATA, steps=6)),
        lambda: trainer(run_dir).evaluate(DATA),
        lambda: trainer(None, init_from=run_dir),
    ):
        with expect_error(SettingError, name="run_dir") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    capsys.readouterr()
    assert main(["inspect", str(run_dir)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    after = tree(run_dir)
    assert after.keys() - before.keys() <= {"run.lock"}
    assert all(after[name] == before[name] for name in before if name != "run.lock")
    back()
    resumed(run_dir)


def test_a_checkpoint_that_cannot_be_seen_is_not_taken_for_none(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, older = sorted((run_dir / "checkpoints").iterdir(), reverse=True)
    dangling(newest)
    (newest.parent / "not mounted").rename(run_dir / "newest")
    found = files.find(run_dir)
    assert found is not None
    assert found.path == older
    assert "a link that leads nowhere" in found.passed_over[0]
    shutil.rmtree(older)
    before = tree(run_dir)
    with expect_error(CheckpointError):
        trainer(run_dir).fit(DATA, steps=6)
    assert tree(run_dir) | {"run.lock": b""} == before | {"run.lock": b""}
    assert main(["inspect", str(run_dir)]) == 2
    newest.unlink()
    (run_dir / "newest").rename(newest)
    capsys.readouterr()
    resumed(run_dir)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summaries"])
@pytest.mark.parametrize("hidden", [dangling, circular, fifo, device])
def test_logs_that_cannot_be_seen_are_not_begun_anew(
    hidden: Callable[[Path], Callable[[], None]], name: str, run_dir: Path
) -> None:
    back = hidden(run_dir / name)
    with expect_error(SettingError, name="run_dir"):
        trainer(run_dir).fit(DATA, steps=6)
    back()
    resumed(run_dir)


def test_a_run_directory_that_cannot_be_seen_is_refused_when_the_trainer_is_made(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name in ("link", "link/run", "file", "file/run", "circle"):
        with expect_error(SettingError, name="run_dir"):
            trainer(tmp_path / name)
        assert main(["inspect", str(tmp_path / name)]) == 2
    assert not (tmp_path / "nothing").exists()
    # A link to one that is there is as good as itself.
    (tmp_path / "good").symlink_to(run_dir)
    resumed(tmp_path / "good")


@pytest.mark.slow
def test_at_the_command_it_is_one_line_and_exit_code_2(run_dir: Path) -> None:
    dangling(run_dir / "checkpoints")
    before = lines(run_dir)
    options = ("--engine", "towers", "--workers", "1", "--run-dir", str(run_dir))
    ended = run(command("lasting.py", "2", "0", options=options))
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert "which is not there: is a disk not mounted?" in ended.err
    assert lines(run_dir) == before


@pytest.fixture
def of_nobody(trained: Path) -> Iterator[Path]:
    """A copy of the run directory that belongs to somebody whom modes stop."""
    with folder_of_nobody() as folder, as_nobody():
        run_dir = folder / "run"
        run_dir.mkdir()
        os.seteuid(os.getuid())
        for name in ("checkpoints", "metrics.jsonl", "summaries"):
            (shutil.copytree if (trained / name).is_dir() else shutil.copy)(
                trained / name, run_dir / name
            )
        for path in run_dir.rglob("*"):
            os.chown(path, run_dir.stat().st_uid, run_dir.stat().st_gid)
        yield run_dir


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o400, 0o600])
def test_checkpoints_that_cannot_be_read_are_not_taken_for_none(mode: int, of_nobody: Path) -> None:
    folder = of_nobody / "checkpoints"
    with as_nobody():
        folder.chmod(mode)
        with expect_error(SettingError):
            require_seen(of_nobody)
        with expect_error(SettingError):
            files.find(of_nobody)
        folder.chmod(0o700)
        assert files.find(of_nobody) is not None


def test_a_run_directory_that_cannot_be_read_is_not_taken_for_an_empty_one(of_nobody: Path) -> None:
    with as_nobody():
        of_nobody.chmod(0o000)
        with expect_error(SettingError):
            files.find(of_nobody)
        of_nobody.chmod(0o700)


# --- not written ----------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [".", "checkpoints"])
def test_a_directory_that_cannot_be_written_to_is_found_before_step_1(
    folder: str, of_nobody: Path
) -> None:
    before = tree(of_nobody)
    with as_nobody():
        (of_nobody / folder).chmod(0o500)
        with expect_error(SettingError):
            require_usable(of_nobody, print)
        (of_nobody / folder).chmod(0o700)
        require_usable(of_nobody, print)
    assert tree(of_nobody) == before


def test_checkpoints_on_a_disk_that_is_read_only_are_found_before_step_1(
    run_dir: Path, tmp_path: Path
) -> None:
    class Never(quorate.Callback):
        def started(self, trainer: object) -> None:
            raise AssertionError("it began")

    with disk(tmp_path / "disk") as place:
        shutil.move(run_dir / "checkpoints", place / "checkpoints")
        (run_dir / "checkpoints").symlink_to(place / "checkpoints")
        remount(place, "ro")
        before = tree(run_dir) | {"run.lock": b""}
        with expect_error(SettingError, name="run_dir") as caught:
            trainer(run_dir).fit(DATA, steps=6, callbacks=[Never()])
        assert "\n" not in str(caught.value)
        assert tree(run_dir) | {"run.lock": b""} == before
        remount(place, "rw")
        resumed(run_dir)
        # All of it on that disk.
        whole = place / "run"
        trainer(whole).fit(DATA, steps=1)
        remount(place, "ro")
        with expect_error(SettingError, name="run_dir"):
            trainer(whole).fit(DATA, steps=2)


def test_a_resume_on_a_full_disk_trains_on_and_leaves_nothing_behind(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with disk(tmp_path / "disk", "2m") as place:
        run_dir = Path(shutil.copytree(trained, place / "run"))
        (run_dir / "run.lock").unlink()
        filler = fill(place)
        before = set(tree(run_dir))
        for _ in range(3):
            again = trainer(run_dir, save_every_steps=1)
            with pytest.raises(OSError, match="No space left on device"):
                again.fit(DATA, steps=8)  # the last save fails
            assert again.global_step == 8
            left = set(tree(run_dir)) - before
            assert {name for name in left if not name.startswith("summaries/")} <= {"run.lock"}
            assert not [name for name in left if "/." in name or name.startswith(".")]
        out = capsys.readouterr().out
        assert out.count("step 5 was not saved, training continues: [Errno 28]") == 3
        assert "step 6 was not saved" not in out  # for the same reason, and it was said
        found = files.find(run_dir)
        assert found is not None
        assert found.record["global_step"] == 4
        filler.unlink()
        resumed(run_dir)


def test_what_a_kill_left_half_written_is_removed(run_dir: Path) -> None:
    for folder in (run_dir, run_dir / "summaries", run_dir / "checkpoints"):
        (folder / ".quorate-0123456789abcdef").write_text("half of it")
        (folder / ".quorate-tried_ab").mkdir()
    (run_dir / ".quorate.mine").touch()
    resumed(run_dir)
    assert [name for name in tree(run_dir) if ".quorate-" in name] == []
    assert (run_dir / ".quorate.mine").exists()


# --- begun anew -----------------------------------------------------------------------------------


def test_logs_of_a_run_without_its_checkpoints_are_moved_aside_and_not_cut(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where they lie on a disk of their own, and it is not mounted."""
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").mkdir()
    before = tree(run_dir)
    trainer(run_dir).fit(DATA, steps=2)
    assert f"moved the logs to {run_dir / 'aside-1'}," in capsys.readouterr().out
    aside = tree(run_dir / "aside-1")
    assert aside == {
        name: data
        for name, data in before.items()
        if name.startswith(("metrics", "events", "summaries", "status"))
    }
    assert len(lines(run_dir)) == 2


def test_a_run_that_was_begun_and_made_no_update_leaves_nothing_to_move(run_dir: Path) -> None:
    shutil.rmtree(run_dir)
    for _ in range(2):
        run = trainer(run_dir)

        class Failing(quorate.Callback):
            def started(self, trainer: object) -> None:
                raise LookupError("before the first update")

        with pytest.raises(LookupError):
            run.fit(DATA, steps=2, callbacks=[Failing()])
    assert not list(run_dir.glob("aside-*"))


@pytest.mark.parametrize("hidden", [dangling, circular, replaced, fifo, device])
@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "summaries"])
def test_fresh_moves_aside_whatever_is_there(
    hidden: Callable[[Path], Callable[[], None]], name: str, run_dir: Path
) -> None:
    hidden(run_dir / name)
    before = tree(run_dir)[name]
    run = trainer(run_dir, fresh=True)
    run.fit(DATA, steps=2)
    assert run.global_step == 2
    assert tree(run_dir / "aside-1")[name] == before


def test_what_cannot_be_moved_aside_is_said(run_dir: Path, tmp_path: Path) -> None:
    with disk(tmp_path / "disk") as place:
        # A mount point has to stay where it is.
        os.rename(run_dir / "checkpoints", tmp_path / "checkpoints")  # noqa: PTH104
        inside = place / "run"
        shutil.copytree(run_dir, inside)
        with (
            disk(inside / "checkpoints"),
            expect_error(SettingError, name="run_dir"),
        ):
            trainer(inside, fresh=True).fit(DATA, steps=1)


# --- removed while a run trains -------------------------------------------------------------------


def test_a_directory_that_is_removed_is_said_once_and_saves_come_back_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, away = tmp_path / "run", tmp_path / "away"
    saved = []

    class Moving(quorate.Callback):
        def updated(self, report: Report) -> None:
            if report.global_step == 3:
                run_dir.rename(away)
            if report.global_step == 9:
                away.rename(run_dir)

        def saved(self, global_step: int, path: Path) -> None:
            saved.append(global_step)

    run = trainer(run_dir, save_every_steps=1, keep=99)
    run.fit(DATA, steps=12, callbacks=[Moving()])
    out = capsys.readouterr().out
    assert out.count("was not saved, training continues: [Errno 2] No such file") == 1
    assert out.count("was saved: checkpoints can be written again") == 1
    assert saved == [1, 2, 9, 10, 11, 12]
    assert len(lines(run_dir)) == 12  # the file went with the directory
    resumed_ = files.find(run_dir)
    assert resumed_ is not None
    assert resumed_.record["global_step"] == 12


def test_a_directory_that_stays_away_is_made_again_for_the_last_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"

    class Removing(quorate.Callback):
        def updated(self, report: Report) -> None:
            if report.global_step == 3:
                shutil.rmtree(run_dir)

    run = trainer(run_dir, save_every_steps=2)
    run.fit(DATA, steps=9, callbacks=[Removing()])
    assert capsys.readouterr().out.count("was not saved, training continues") == 1
    found = files.find(run_dir)
    assert found is not None
    assert found.record["global_step"] == 9
    again = trainer(run_dir)
    again.fit(DATA, steps=10)
    assert again.global_step == 10
