"""The command line: our words and the script's words, exit codes, help, completion."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.at_the_command import COMMANDS, QUORATE
from support.messages import expect_message
from support.runs import inspected
from support.runs import run as run_to_its_end
from support.typed_mistakes import SCRIPT, make

import quorate
from quorate.__main__ import main

SAVED = Path(__file__).parents[1] / "services" / "data" / "before-rooms"

# --- options before or behind the script ----------------------------------------------------------

# Prints whether the script is a module, quorate's options, and the script's own words.
ECHO = """
import sys, torch, quorate
trainer = quorate.Trainer(torch.nn.Linear(1, 1), lambda model, batch: batch, batch_size=4,
    optimizer=lambda parameters: torch.optim.SGD(parameters))
print(__name__, __spec__ is not None, trainer.run_dir, *sys.argv[1:])
"""
FOUND: dict[str, str] = {  # words behind ``quorate run``: output of the script
    "--run-dir x a.py": "x",
    # Words of the script's may stand between ours, and before them.
    "a.py --epochs 3 --run-dir x": "x --epochs 3",
    "a.py --run-dir=x b --no-compile c": "x b c",  # a switch takes no value
    # The script's own short options, -m too; behind a module our options are allowed as well.
    "a.py -m y --run-dir x -n": "x -m y -n",
    "-m pkg.a b --run-dir x": "x b",
    "--run-dir x -mpkg.a": "x",
    # Both: the last value holds.
    "--run-dir y a.py --run-dir x b": "x b",
    # -- ends our options, before the script or behind the script, and only once.
    "--run-dir x -- a.py --run-dir y": "x --run-dir y",
    "--run-dir x -m pkg.a -- --run-dir y": "x --run-dir y",
    "a.py --run-dir x -- -- b": "x -- b",
    # A script has a help text too.
    "--run-dir x a.py --help": "x --help",
    # A value may look like an option.
    "a.py --run-dir -1": "-1",
}


@pytest.mark.parametrize("typed", FOUND)
def test_options_stand_before_the_script_or_behind_it(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.modules.pop("pkg", None)  # of another test, in another folder
    (tmp_path / "pkg").mkdir()
    (tmp_path / "a.py").write_text(ECHO)
    (tmp_path / "pkg" / "a.py").write_text(ECHO)
    monkeypatch.chdir(tmp_path)
    main(["run", "--devices", "cpu", *typed.split()])
    is_module = "-mpkg" in typed.replace(" ", "")
    line = capsys.readouterr().out.splitlines()[0]
    assert line == f"__main__ {is_module} {FOUND[typed]}"


# Lines of a script, the words behind the script, and the file with the same option.
BOTH = [
    ("print('--seed', sys.argv[1:])", "--seed 1", "script.py"),
    ("print('--seed', sys.argv[1:])", "--shards 4", ""),
    ("print('--seed', sys.argv[1:])", "-- --seed 1", ""),
    ("import first", "--seed 1", "options.py"),
    ("import other", "--seed 1", ""),
]


@pytest.mark.parametrize(("text", "typed", "file"), BOTH)
def test_an_option_that_the_script_has_too_is_said(
    text: str, typed: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.exit(3)\n{text}\n")
    (tmp_path / "first.py").write_text("import options\n")
    (tmp_path / "options.py").write_text("import first\nprint('--seed', '--keep')\n")
    (tmp_path / "other.py").write_text("this is no Python --seed")
    with pytest.raises(SystemExit):
        main(["run", str(script), *typed.split()])
    said = capsys.readouterr().err
    assert f"--seed behind {script} is taken as quorate run's" in said or not file
    assert f"{file} names one too" in " ".join(said.split()) if file else said == ""


def test_a_module_runs_with_the_same_bits_on_processes_as_its_file_on_a_tower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "pkg"
    package.mkdir()  # without an __init__.py
    (package / "beside.py").write_text("RATE = 0.1\n")
    (package / "train.py").write_text(
        SCRIPT.replace("import quorate\n", "import quorate\nfrom pkg.beside import RATE\n")
        .replace("lr=0.1", "lr=RATE")
        .replace("batch_size=8", "batch_size=8, shards=2")
    )
    monkeypatch.chdir(tmp_path)
    two = ["--devices", "cpu", "--workers", "2", "--run-dir", "two", "-m", "pkg.train"]
    assert run_to_its_end([*QUORATE, "run", *two]).code == 0
    monkeypatch.syspath_prepend(str(tmp_path))
    one = ["run", "--devices", "cpu", "--workers", "1", "--run-dir", "one", "pkg/train.py"]
    assert main(one) == 0
    found = [inspected(tmp_path / name) for name in ("one", "two")]
    assert found[0]["digest"] == found[1]["digest"]
    assert (found[1]["engine"], found[1]["workers"]) == ("processes", 2)


# --- exit codes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("import sys; sys.exit(7)", 7),
        ("raise EOFError('the end')", 1),
        ("import quorate; raise quorate.UserError('a mistake')", 2),
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


# --- help and completion --------------------------------------------------------------------------


@pytest.mark.slow
def test_what_needs_nothing_heavy_imports_nothing_heavy(tmp_path: Path) -> None:
    make(tmp_path)
    shutil.copytree(SAVED, tmp_path / "run")
    check = (
        "import sys; from quorate.__main__ import main;"
        "codes = [main(typed.split()) for typed in sys.argv[2:]];"
        "sys.exit(str((codes, sys.modules.keys() & sys.argv[1].split())))"
    )
    helps = ["--help", "--version", *(f"{name} --help" for name in COMMANDS)]
    for heavy, typed in (
        ("torch numpy rich psutil", helps),
        ("torch numpy rich", ["runs .", "inspect run", "inspect --json run"]),
        ("torch", ["doctor --json"]),  # asks torch in another process
    ):
        command = [sys.executable, "-c", check, heavy, *typed]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=tmp_path)
        assert done.stderr == f"({[0] * len(typed)}, set())\n"
    # The front door leaves torch's compiler alone: importing the compiler takes as long as torch,
    # in every worker process.
    code = "import sys, quorate; quorate.Trainer; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_version_and_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"quorate {quorate.__version__}\n"
    assert main([]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert all(f"\n  {name} " in output.err for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option is shown once, with its place in a script."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    flags = [line.split()[0] for line in shown.splitlines() if line.startswith("  --")]
    assert len(flags) == len({*flags})
    expect_message(shown)
