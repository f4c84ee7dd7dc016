"""The command line: what is ours and what is the script's, mistakes, exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.at_the_command import COMMANDS, QUORATE, ended
from support.runs import inspected
from support.runs import run as run_to_its_end
from support.typed_mistakes import SCRIPT

from quorate.commands import child_run, run
from quorate.commands.bench import command as bench
from quorate.commands.command import ScriptCommand
from quorate.commands.main import main
from quorate.commands.namesakes import namesakes
from quorate.commands.options import as_typed
from quorate.commands.verify import command as verify
from quorate.training.recipe import OPTIONS


def the_line(capsys: pytest.CaptureFixture[str]) -> str:
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert shown.out == ""
    return line


# --- options before or behind the script ----------------------------------------------------------


def parsed(command: ScriptCommand, *typed: str) -> tuple[Any, Any, tuple[str, ...]]:
    with command.make_context("quorate", list(typed)) as ctx:
        return ctx.params["workers"], ctx.params["script"], ctx.params["arguments"]


@pytest.mark.parametrize("command", [run.command, verify.command, bench.command])
@pytest.mark.parametrize(
    ("typed", "workers", "arguments"),
    [
        (("--workers", "2", "a.py"), 2, ()),
        (("--workers=2", "a.py", "--epochs", "3"), 2, ("--epochs", "3")),
        (("a.py", "--workers", "2"), 2, ()),
        (("a.py", "--workers=2", "--epochs", "3"), 2, ("--epochs", "3")),
        # Words of the script's may stand between ours, and before them.
        (("a.py", "--epochs", "3", "--workers", "2"), 2, ("--epochs", "3")),
        (("a.py", "--workers=2", "b", "--no-compile", "c"), 2, ("b", "c")),
        (("a.py", "-", "--workers", "2"), 2, ("-",)),
        # The script's own short options, -m too; a module has ours behind it as well.
        (("a.py", "-m", "x", "--workers", "2", "-n"), 2, ("-m", "x", "-n")),
        # Both: the last one holds.
        (("--workers", "1", "a.py", "--workers", "2", "b"), 2, ("b",)),
        # Switches take no value.
        (("a.py", "--compile", "--workers", "2", "b"), 2, ("b",)),
        (("a.py", "--no-compile", "b"), None, ("b",)),
        # -- ends ours, before the script or behind it, and only once.
        (("--workers", "2", "--", "a.py", "--workers", "9"), 2, ("--workers", "9")),
        (("--workers", "2", "a.py", "--", "--workers", "9"), 2, ("--workers", "9")),
        (("a.py", "--workers", "2", "--", "--", "b"), 2, ("--", "b")),
        (("--workers", "2", "a.py", "b", "--", "c"), 2, ("b", "c")),
        (("a.py", "b", "--workers", "2", "--", "--workers", "9"), 2, ("b", "--workers", "9")),
        # A script has a help of its own.
        (("--workers", "2", "a.py", "--help"), 2, ("--help",)),
    ],
)
def test_options_stand_before_the_script_or_behind_it(
    command: ScriptCommand,
    typed: Sequence[str],
    workers: int | None,
    arguments: Sequence[str],
) -> None:
    found, script, rest = parsed(command, *typed)
    if workers is not None or command is run.command:  # others have a default
        assert found == (None if workers is None else str(workers))
    assert (script, rest) == ("a.py", arguments)


@pytest.mark.parametrize(
    ("typed", "arguments"),
    [
        (("-m", "pkg.a", "b", "--workers", "2"), ("b",)),
        (("--workers", "2", "-m", "pkg.a", "-m", "b"), ("-m", "b")),
        (("--workers", "2", "-mpkg.a"), ()),
        (("--workers", "2", "-m", "pkg.a", "--", "--workers", "9"), ("--workers", "9")),
    ],
)
def test_a_module_stands_in_the_place_of_the_script(
    typed: Sequence[str], arguments: Sequence[str]
) -> None:
    assert parsed(run.command, *typed) == ("2", "pkg.a", arguments)
    with run.command.make_context("quorate", list(typed)) as ctx:
        assert ctx.params["module"] == "pkg.a"


def test_what_a_script_has_too_is_said_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import argparse, sys\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--seed', type=int, default=7)\n"
        "print(parser.parse_args(sys.argv[1:]))\n"
        "sys.exit(3)\n"
    )
    for typed, value, said in (
        (("--seed", "1"), 7, True),
        (("--shards", "4"), 7, False),
        (("--", "--seed", "1"), 1, False),
    ):
        with pytest.raises(SystemExit):
            main(["run", str(script), *typed])
        shown = capsys.readouterr()
        assert shown.out == f"Namespace(seed={value})\n"
        line = (
            f"quorate: --seed behind {script} is taken as quorate run's, and {script} names one "
            "too: its own stands behind --\n"
        )
        assert shown.err == (line if said else "")


@pytest.mark.parametrize(
    ("imports", "is_found"),
    [
        ("from options import parse", True),
        ("import options as o", True),
        ("from .options import parse", True),
        ("from . import options", True),
        ("from pkg.options import parse", True),
        ("import first", True),  # which imports options, and that it
        ("import other", False),
        ("text = 'options'", False),
    ],
)
def test_what_a_file_beside_the_script_has_too_is_found(
    imports: str, is_found: bool, tmp_path: Path
) -> None:
    script, beside = tmp_path / "script.py", tmp_path / "options.py"
    script.write_text(f"{imports}\n")
    (tmp_path / "first.py").write_text("import options\n")
    beside.write_text("import first\nprint('--seed', '--keep')\n")
    (tmp_path / "other.py").write_text("this is no Python --seed")
    expected = {"--seed": beside} if is_found else {}
    assert namesakes(script, ["--seed", "--shards"]) == expected
    assert namesakes(None, ["--seed"]) == {}


def test_a_module_runs_as_python_would_run_it(tmp_path: Path) -> None:
    package = tmp_path / "pkg" / "sub"  # without an __init__.py: as many have it
    package.mkdir(parents=True)
    (package / "beside.py").write_text("x = 5\n")
    (package / "tool.py").write_text(
        "import sys\nfrom pkg.sub.beside import x\nprint(__name__, __package__, sys.argv, x)\n"
    )
    words = ("-m", "pkg.sub.tool", "a", "--b")
    options = {"capture_output": True, "text": True, "cwd": tmp_path}
    plain = subprocess.run([sys.executable, *words], check=True, **options)
    ours = subprocess.run([*QUORATE, "run", *words], check=True, **options)
    assert ours.stdout == plain.stdout


@pytest.mark.slow
def test_a_module_has_the_same_bits_on_worker_processes_as_its_file_on_a_tower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "beside.py").write_text("RATE = 0.1\n")
    (package / "train.py").write_text(
        SCRIPT.replace("import quorate\n", "import quorate\nfrom pkg.beside import RATE\n")
        .replace("lr=0.1", "lr=RATE")
        .replace("batch_size=8", "batch_size=8, shards=2")
    )
    monkeypatch.chdir(tmp_path)
    ended("run", "-m", "pkg.train", "--devices", "cpu", "--workers", "2", "--run-dir", "two")
    monkeypatch.syspath_prepend(str(tmp_path))
    one = ["run", "--devices", "cpu", "--workers", "1", "--run-dir", "one", "pkg/train.py"]
    assert main(one) == 0
    found = [inspected(tmp_path / name) for name in ("one", "two")]
    assert found[0]["digest"] == found[1]["digest"]
    assert (found[1]["engine"], found[1]["workers"]) == ("processes", 2)


def test_a_value_that_looks_like_an_option_is_a_value() -> None:
    with run.command.make_context("quorate", ["--seed", "-1", "a.py", "--shards", "-2"]) as ctx:
        assert (ctx.params["seed"], ctx.params["shards"]) == (-1, -2)


def test_all_options_of_run_reach_a_child_run_as_they_were_given() -> None:
    values = {str: "x", int: 3, float: 0.1, bool: False}
    given = {name: values[o.kind] for name, o in OPTIONS.items() if o.kind is not None}
    with run.command.make_context("quorate", [*as_typed(given), "a.py"]) as ctx:
        assert {name: ctx.params[name] for name in given} == given


def test_what_follows_a_script_in_a_child_run_is_the_scripts(tmp_path: Path) -> None:
    script, said = tmp_path / "script.py", tmp_path / "said"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    with said.open("wb") as output:
        code = child_run.child_run(
            {"workers": 1}, str(script), None, ["--workers", "9"], output, lambda: False
        )
    lines = said.read_text().splitlines()
    assert (code, lines[0]) == (0, "['--workers', '9']")
    assert lines[1:] == [run.UNUSED.format(script)]


def test_the_command_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert all(f"\n  {name} " in output.err for name in COMMANDS)


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (["veryfy"], "quorate: no such command: veryfy; did you mean verify? see quorate --help"),
        (
            ["mend"],
            f"quorate: no such command: mend; expected {', '.join(COMMANDS)}; see quorate --help",
        ),
        (
            ["train.py", "--workers", "2"],
            "quorate: no such command: train.py; did you mean quorate run train.py? "
            "see quorate --help",
        ),
        (
            ["--verson"],
            "quorate: no such option: --verson; did you mean --version? see quorate --help",
        ),
        (
            ["run", "--precison", "bf16", "a.py"],
            "quorate: no such option: --precison; did you mean --precision? see quorate run --help",
        ),
        (
            ["verify", "--update-s", "2", "a.py"],
            "quorate: no such option: --update-s; did you mean --updates? "
            "see quorate verify --help",
        ),
        (["run"], "quorate: missing argument 'SCRIPT'; see quorate run --help"),
        (["run", "--workers"], "quorate: option --workers lacks its value; see quorate run --help"),
        (
            ["bench", "a.py", "--out"],
            "quorate: option --out lacks its value; see quorate bench --help",
        ),
        (
            ["run", "nowhere.py"],
            "quorate: script: got 'nowhere.py', expected a Python file; check the path",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    typed: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed) == 2
    assert the_line(capsys) == line


# --- exit codes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(7)", 7),
        ("raise EOFError('the end')", 1),
        ("import quorate; raise quorate.UserError('a mistake')", 2),
        ("from quorate.errors import NotFiniteError; raise NotFiniteError('nan')", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_a_script_ends_as_it_would_by_itself(body: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(body + "\n")
    done = run_to_its_end([*QUORATE, "run", str(script)])
    assert done.code == code
    assert done.out == ""
    assert ("Traceback" in done.err) == ("EOFError" in body)
    assert len(done.err.splitlines()) == 1 or code != 2


def test_exit_codes_and_completion_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "  1    the run failed",
        "  130  ended by Ctrl-C (143: by SIGTERM)",
        "_QUORATE_COMPLETE",
        "  NO_COLOR ",
    ):
        assert line in shown
    assert [
        line.split()[0] for line in shown.partition("Commands:\n")[2].splitlines()[: len(COMMANDS)]
    ] == list(COMMANDS)
