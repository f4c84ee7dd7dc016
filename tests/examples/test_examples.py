"""The examples as a user runs them: two updates on small files, on several numbers of workers."""

import difflib
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from support import example_data
from support.example_modules import EXAMPLES
from support.runs import inspected
from support.warm import WARM
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STAMP = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}: "
TUTORIAL_LINE = STAMP + r"step 2, loss = \d\.\d\d \(\d+\.\d examples/sec; \d+\.\d{3} sec/batch\)$"


class Example(NamedTuple):
    """An example, and the way to run the example here."""

    data: Callable[[Path], None]  # writes the example's files into a folder
    words: str  # make a run two updates long
    prints: tuple[str, ...]  # patterns
    reached: str = "--target 0"  # makes a run reach the target
    missed: str = "--target 1.01"  # makes a run miss the target
    data_name: str = ""  # of --data in the folder


RUNS = {
    "contrastive.py": Example(
        example_data.fashion_mnist, "--epochs 1", (r"of the test images are found among 512$",)
    ),
    "gan.py": Example(
        lambda folder: example_data.fashion_mnist(folder, 128),
        "--epochs 2",
        ("distance from the test images", "d/right"),
        *("--target 9", "--target 0"),
    ),
    "fashion_mnist.py": Example(
        example_data.fashion_mnist,
        "--epochs 8 --batch-size 48",
        (r"^48 rows = 4 shards x 12 on ", r"^results: (\S+)  \(quorate inspect \1\)$"),
        "--target 0.5",  # a model learns: 0.1 would be chance
    ),
    "teacher.py": Example(
        lambda folder: example_data.fashion_mnist(folder, 1200),
        "--epochs 1",
        ("test accuracy: student ",),
    ),
    "mnist/train.py": Example(
        example_data.mnist,
        "--num-epochs 1 --log-every 2",
        (TUTORIAL_LINE, "Done training for 1 epochs, 2 steps.", r"^test accuracy 0\.\d{4}, target"),
    ),
    "cifar10/train.py": Example(
        example_data.cifar10,
        "--steps 2",
        (r"^128 rows = 4 shards x 32 on ", STAMP + r"Session started\.$", r"plain weights [\d.]+"),
    ),
    "segmentation/train.py": Example(
        example_data.earth, "--updates 2 --batch-size 4 --shard-rows 2", ("other land",)
    ),
    "chatbot/train.py": Example(
        example_data.pairs,
        "--language en --units 32 --layers 1 --batch-size 24 --steps 2",
        ("^24 rows = 2 shards x 12 on ", "validation  loss", "bleu"),
        *("--target unigram= --target others=9", "--target unigram=0.01"),
        "pairs.tsv",
    ),
}


def run(*words: str, cache: Path) -> tuple[int, str]:
    """Run a command in a fork; return the exit code and the whole output."""
    code, out, err = WARM.run(words, {**os.environ, "QUORATE_DATA": str(cache)}, 240)
    return code, out + err


def measured(run_dir: Path) -> list[object]:
    """Return losses and validations of a run, to the last bit."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line.get("validation", line.get("loss")) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_example_has_the_same_bits_on_any_workers(name: str, tmp_path: Path) -> None:
    example, data = RUNS[name], tmp_path / "data"
    data.mkdir()
    example.data(data)
    script = [str(EXAMPLES / name), "--", "--data", str(data / example.data_name)]
    script += example.words.split()

    def trained(where: str, target: str, *options: str) -> tuple[int, str]:
        place = ["--run-dir", str(tmp_path / where)]
        words = ["run", "--devices", "cpu", *options, *place, *script, *target.split()]
        return run(*words, cache=tmp_path / "cache")

    code, said = trained("one", example.reached, "--engine", "towers", "--workers", "3")
    assert code == 0, said
    for pattern in example.prints:
        assert re.search(pattern, said, re.MULTILINE), said
    code, said = trained("two", example.missed, "--engine", "processes", "--workers", "2")
    assert code == 1, said
    one, two = (inspected(tmp_path / where) for where in ("one", "two"))
    assert two["global_step"] >= 2
    for digest in ("digest", "averaged_digest"):
        assert one.get(digest) == two.get(digest)
    assert measured(tmp_path / "one") == measured(tmp_path / "two")
    if name == "mnist/train.py":  # each replica's loss, and their mean
        events = EventAccumulator(str(tmp_path / "two" / "summaries")).Reload()
        mean, *each = (events.Scalars(n)[-1].value for n in ("loss", "loss_0", "loss_1"))
        assert min(each) <= mean <= max(each)


@pytest.mark.parametrize("folder", ["mnist", "cifar10"])
def test_the_two_programs_differ_in_few_lines_and_the_readme_shows_them(folder: str) -> None:
    readme, *programs = (
        (EXAMPLES / folder / name).read_text().splitlines()
        for name in ("README.md", "single.py", "train.py")
    )
    compared = [*difflib.unified_diff(*programs, n=0, lineterm="")][2:]
    changed = [line for line in compared if line[0] in "+-"]
    assert 0 < len(changed) <= 40
    assert [line for line in changed if line not in readme] == []


@pytest.mark.slow
def test_three_trainings_have_one_digest(tmp_path: Path) -> None:
    """Compare trainings after a lost worker, after a lost run, and without a loss."""
    text = (EXAMPLES / "kill_it.py").read_text()
    for long, short in (("epochs=8", "epochs=3"), ("_steps=100", "_steps=50")):
        assert long in text
        text = text.replace(long, short)
    (script := tmp_path / "kill_it.py").write_text(text)
    words = [sys.executable, str(script)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *_, worker_killed, run_killed, undisturbed, verdict = ended.stdout.splitlines()
    assert verdict == "the same bits, three times"
    assert "killed by signal 9" in ended.stdout
    assert "resumed step" in ended.stdout
    assert len({line.split()[-1] for line in (worker_killed, run_killed, undisturbed)}) == 1


@pytest.mark.slow
def test_parts_of_a_model_are_placed_by_names_as_tensorflow_has_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["placement.py", "--devices", "/cpu:0,CPU"])
    runpy.run_path(str(EXAMPLES / "placement.py"), run_name="__main__")
    assert "44" in capsys.readouterr().out
