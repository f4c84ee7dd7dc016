"""A script run again by workers: the comparison, the input, the written files, the mistakes."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from support.runs import LIMIT_S, Ended, command, run

import quorate
from quorate.errors import InputError, UserError

BEGIN = """
import itertools, json, logging, os, signal, sys, time
import torch, quorate
from quorate.data import at
from torch.utils.data import Dataset

class Rows(Dataset):
    def __init__(self, value=lambda row: float(row)):
        self.value = value
    def __len__(self):
        return 32
    def __getitem__(self, row):
        return torch.full((4,), self.value(row) / 32)

torch.manual_seed(0)
ROWS = validation = Rows()
STEPS, CALLBACKS = 6, []
loss = lambda model, batch: (model(batch) - 1).square().mean()
factor = 2.0 if quorate.is_worker() else 1.0
"""
END = """
trainer = quorate.Trainer(torch.nn.Linear(4, 1), loss, batch_size=8, shards=2,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
trainer.fit(ROWS, steps=STEPS, shuffle=False, callbacks=CALLBACKS,
    validation=quorate.Validation(validation, every_steps=3))
"""
RANKS = ("--engine", "collective", "--workers", "2")


def words_of(folder: Path, middle: str, *options: str) -> list[str]:
    (script := folder / "script.py").write_text(BEGIN + middle + END)
    return command(script, options=options or ("--engine", "processes", "--workers", "2"))


def fed(words: list[str]) -> Ended:
    """Run with a line of input."""
    ended = subprocess.run(words, input="bob\n", capture_output=True, text=True, timeout=LIMIT_S)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


# Lines of a script, its exit code, and the printed words.
COMPARED = {
    "drawn": (
        "numbers = itertools.count()\nROWS = Rows(lambda row: float(next(numbers)))\n"
        "validation = Rows(lambda row: float(at().step))",  # at the same place: the same
        *(0, "the dataset gives different values each time it is loaded"),
    ),
    "clock": (
        "loss = lambda model, batch: model(batch).mean() * (time.perf_counter() % 1)",
        *(0, "same bits: no, because the same shard gives different results each time"),
    ),
    "validation": ("validation = Rows(lambda row: row * factor)", 2, "another validation"),
    "gradient": (
        "loss = lambda model, batch: model(batch).square().mean() * factor",
        *(2, "a worker that ran the script again computes another gradient from the same rows"),
    ),
    "raises": (
        "def value(row):\n    if quorate.is_worker():\n        raise ValueError('there alone')\n"
        "    return float(row)\nROWS = Rows(value)",
        *(1, "ValueError: there alone"),
    ),
}


@pytest.mark.parametrize("name", COMPARED)
def test_a_worker_is_compared_with_the_coordinator(name: str, tmp_path: Path) -> None:
    middle, code, says = COMPARED[name]
    ended = run(words_of(tmp_path, middle))
    assert ended.code == code, ended.said
    assert says in ended.said, ended.said
    if code == 2:
        assert len(ended.err.splitlines()) == 1
    if name == "raises":
        assert re.search(r"quorate: worker \d.*rows \[0, 1, 2, 3\]", ended.err), ended.err
    assert name == "validation" or "another validation" not in ended.said


READS = """
READS = [lambda: input("name? "), lambda: sys.stdin.read(), lambda: sys.stdin.readline(),
    lambda: sys.stdin.readlines(), lambda: list(sys.stdin), lambda: sys.stdin.buffer.read()]
open("roles", "a").write(f"{quorate.is_worker()}\\n")
if quorate.is_worker():
    said = [sys.stdin.isatty(), sys.stdin.closed, sys.stdin.fileno(), sys.stdin.readable()]
    for read in READS:
        try:  # a script that is content with no input stays so
            read()
        except EOFError as error:
            said.append(f"{type(error).__name__}: {error}")
    open("said", "w").write(json.dumps(said))
else:
    assert input() == "bob"
"""
WRITES = """
os.umask(0o027)
os.chdir(%r)
open("read").read(), open("closed", "a").close()
ways = [open("w", "w"), open("a", "a"), open("r+b", "r+b"), os.open("os", os.O_RDWR),
    logging.FileHandler("logging", "w")]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("options", "workers"), [((), 2), (RANKS, 1)], ids=["processes", "ranks"])
def test_a_worker_has_no_input_and_names_files_that_the_script_is_writing(
    options: tuple[str, ...], workers: int, tmp_path: Path
) -> None:
    for name in ("read", "closed", "r+b", "os"):
        (tmp_path / name).write_text("x")
    (run_dir := tmp_path / "run").mkdir(mode=0o750)
    words = words_of(tmp_path, WRITES % str(tmp_path) + READS, *options)
    ended = fed([*words[:4], "--run-dir", str(run_dir), *words[4:]])
    assert ended.code == 0, ended.err
    roles = (tmp_path / "roles").read_text().split()
    assert sorted(roles) == ["False", *["True"] * workers]
    is_terminal, is_closed, number, can_read, *errors = json.loads((tmp_path / "said").read_text())
    assert (is_terminal, is_closed, number, can_read) == (False, False, 0, True)
    assert len(errors) == 6
    for error in errors:
        assert re.match(r"InputError: stdin: script\.py:\d+ reads it in a worker process", error)
    found = re.findall(r"(\S+): each worker process (\w+)[^\n]* \(script\.py:\d+\)", ended.out)
    named = {Path(path).name: verb for path, verb in found}
    assert len(found) == len(named)  # once, however many workers and times
    writes = dict.fromkeys(("a", "r+b", "os"), "writes")
    assert named == {"w": "empties", "logging": "empties", **writes}
    # A run directory has the modes of the umask.
    modes = {path: path.stat().st_mode & 0o777 for path in run_dir.rglob("*")}
    assert any(path.name == "model.safetensors" for path in modes)
    lock = modes.pop(run_dir / "run.lock")
    assert lock == 0o600  # a mere reader of the directory must not be able to lock it
    expected = {path: 0o750 if path.is_dir() else 0o640 for path in modes}
    assert modes == expected


# Actions of processes in the place of their training, in the order of arrival.
ENDS = """
def fail():  # as any program it does what it wanted done at its end
    import atexit, pathlib, threading
    atexit.register(pathlib.Path(%r, "at exit").touch)
    threading.Timer(0.5, pathlib.Path(%r, "a thread").touch).start()
    raise ValueError(7)

ENDS = [lambda: sys.exit(3), lambda: os._exit(4), lambda: sys.exit("words"), fail,
    lambda: os.kill(os.getpid(), signal.SIGSEGV), lambda: os.kill(os.getpid(), 40)]
if quorate.is_worker():
    for number, end in enumerate(ENDS):
        try:
            open(os.path.join(%r, f"life-{number}"), "x").close()
        except FileExistsError:
            continue
        end()
def loss(model, batch):
    time.sleep(0.05)
    return model(batch).mean()
STEPS = 40
"""
SAID = [
    "ended with exit code 3 while starting: it printed nothing",
    "ended with exit code 4 while starting: it printed nothing",
    "ended with exit code 1 while starting: words",
    "was killed by signal 11 (SIGSEGV)",
    "was killed by signal 40",
    "raised ValueError: 7 (script.py:",
]


@pytest.mark.slow
def test_ends_of_workers_that_start_are_told_apart_and_others_come(tmp_path: Path) -> None:
    words = words_of(tmp_path, ENDS % ((str(tmp_path),) * 3), "--workers", "4")
    ended = run(words)
    assert ended.code == 0, ended.said
    assert [how for how in SAID if how not in ended.said] == [], ended.said
    assert (tmp_path / "at exit").exists()
    assert (tmp_path / "a thread").exists()


RAISES = "if quorate.is_worker():\n    raise FileNotFoundError(2, 'No such file', 'rows.csv')\n"
LINE = BEGIN.count("\n") + 2
TEXT = f"raised FileNotFoundError: [Errno 2] No such file: 'rows.csv' (script.py:{LINE})"


def test_what_the_script_raises_in_workers_is_shown_once(tmp_path: Path) -> None:
    ended = run(words_of(tmp_path, RAISES))
    assert ended.code == 1
    assert ended.said.count("Traceback") == 1
    (line,) = [line for line in ended.out.splitlines() if TEXT in line]
    assert line.endswith(f"{TEXT} while starting; another is starting")
    assert f'script.py", line {LINE}, in <module>' in ended.err
    assert len(ended.err.splitlines()) < 12, ended.err
    ended = run(words_of(tmp_path, RAISES, *RANKS))
    assert ended.code == 1
    assert ended.err == f"quorate: rank 1 {TEXT} while starting, before all ranks had met\n"


CUT = """
from quorate.engines.collective.network import TensorGroup
def cut(*_):
    raise RuntimeError("no such wire")
TensorGroup.begin_swap = cut
"""


@pytest.mark.slow
def test_the_line_on_a_rank_that_fails_while_starting_says_why(tmp_path: Path) -> None:
    ended = run(words_of(tmp_path, CUT, *RANKS))
    assert ended.code == 1
    assert re.fullmatch(
        r"quorate: rank 1 (ended with exit code 1 while starting: quorate|on .* has left): rank 1 "
        "of 2 waited for another .*, and it is gone: no such wire; started again, .*\n",
        ended.err,
    ), ended.err


EDITED = """
class Edits(quorate.Callback):
    def updated(self, report):
        gone = trainer.workers[1]
        if report.global_step == 2:
            with open(__file__, "a") as file:
                file.write("# edited")
            os.kill(gone.pid, signal.SIGKILL)
        if report.global_step > 6 and gone.is_gone:
            trainer.stop()
def loss(model, batch):
    time.sleep(0.05)
    return model(batch[0]).mean()
STEPS, CALLBACKS = 600, [Edits()]
"""


@pytest.mark.slow
def test_a_script_that_is_edited_during_the_run_has_no_new_workers(tmp_path: Path) -> None:
    """A lost worker cannot be replaced, and the rest of the workers go on."""
    ended = run(words_of(tmp_path, EDITED))
    assert ended.code == 0, ended.said
    said = "script.py was edited during the run, so no other worker can start; the run continues"
    assert said in ended.said


def test_the_role_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quorate.is_worker() is False
    for rank, is_worker in (("0", False), ("3", True)):
        monkeypatch.setenv("RANK", rank)
        assert quorate.is_worker() is is_worker
    assert issubclass(InputError, UserError)
    assert issubclass(InputError, EOFError)
