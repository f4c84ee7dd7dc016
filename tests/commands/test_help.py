"""Help, version, completion and the terminal: what the command shows, and at once."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

import pytest
from support.at_the_command import COMMANDS, QUORATE, ended

from quorate.commands.main import main
from quorate.commands.options import GROUPS, flag
from quorate.commands.options import OPTIONS as ALL_OPTIONS
from quorate.training.recipe import OPTIONS


@pytest.mark.parametrize(
    "typed", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
)
def test_help_imports_nothing_heavy(typed: list[str]) -> None:
    check = (
        "import sys; from quorate.commands.main import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'numpy', 'rich', 'psutil'} & sys.modules.keys();"
        "sys.exit(str(heavy) if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, *typed],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    import quorate

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"quorate {quorate.__version__}\n"


def test_the_help_of_run_names_each_option_once_and_where_it_is_in_a_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--help"]) == 0
    shown = capsys.readouterr().out
    flags = [line.split()[0] for line in shown.splitlines() if line.startswith("  -")]
    for name, option in OPTIONS.items():
        if option.kind is not None:
            names = (flag(name), f"--[no-]{flag(name)[2:]}")
            assert sum(map(flags.count, names)) == 1
            assert f"[{option.place}]" in shown
    for hidden in ("--dies-with",):
        assert hidden not in shown
    for visible in ("--profile FILE", "--record FOLDER"):
        assert visible in shown


def test_every_option_stands_in_one_group_of_the_help() -> None:
    listed = [name for members in GROUPS.values() for name in members]
    assert sorted(listed) == sorted(n for n, o in ALL_OPTIONS.items() if o.kind is not None)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("typed", [[], *([name] for name in COMMANDS)])
def test_the_help_fits_the_terminal(
    width: int,
    typed: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([*typed, "--help"]) == 0
    shown = capsys.readouterr().out
    long = [line for line in shown.splitlines() if len(line) > min(width, 100)]
    assert [line for line in long if "_QUORATE_COMPLETE" not in line] == []
    whole = re.findall(r"\[\w+\(\w+=\)\]", shown)  # names of settings, none over two lines
    assert len(whole) == "".join(shown.split()).count("=)]")
    if not typed:  # what is to be copied is not broken
        assert '  bash  eval "$(_QUORATE_COMPLETE=bash_source quorate)"\n' in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_produced(shell: str) -> None:
    done = ended(_QUORATE_COMPLETE=f"{shell}_source")
    assert done.returncode == 0, done
    assert "_QUORATE_COMPLETE=" in done.stdout


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("quorate ver", "verify"),
        ("quorate run --prec", "--precision"),
        ("quorate run a.py --soft", "--soft-placement"),
    ],
)
def test_commands_and_options_are_completed(typed: str, completed: str) -> None:
    done = ended(
        _QUORATE_COMPLETE="bash_complete",
        COMP_WORDS=typed,
        COMP_CWORD=str(len(typed.split()) - 1),
    )
    assert f"plain,{completed}" in done.stdout.splitlines()


def test_no_color_is_respected_on_a_terminal() -> None:
    assert COLOUR.search(on_a_terminal([sys.executable, "-c", RED]))
    assert not COLOUR.search(on_a_terminal([sys.executable, "-c", RED], NO_COLOR="1"))
    assert not COLOUR.search(on_a_terminal([*QUORATE, "--help"], NO_COLOR="1"))


# What the display prints with.
RED = "from rich.console import Console; Console().print('[red]slow[/red]')"
COLOUR = re.compile(rb"\x1b\[[0-9;]*3[0-9]")


def on_a_terminal(command: list[str], **environment: str) -> bytes:
    ours, theirs = pty.openpty()
    env = {n: v for n, v in os.environ.items() if n not in ("NO_COLOR", "FORCE_COLOR")}
    env |= {"TERM": "xterm-256color", **environment}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        text = b""
        with suppress(OSError):  # Linux: the other end is closed
            while chunk := os.read(ours, 1 << 16):
                text += chunk
        process.wait(60)
    os.close(ours)
    return text


def test_the_front_door_leaves_torchs_compiler_alone() -> None:
    # Its import takes as long as torch's, in every worker process.
    code = "import sys, quorate; quorate.Trainer; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
