"""Ranks of a collective: the bits of a tower; meanwhile ranks may end and begin anew."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed
from support.references import References
from support.runs import SCRIPTS, TOWER, Ended, command, inspected, run, run_all, soon, torchrun

from quorate.__main__ import main

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="ranks are forked"),
]


def on(ranks: int, *options: str) -> tuple[str, ...]:
    return ("--engine", "collective", "--workers", str(ranks), *options)


def found(run_dir: Path) -> dict[str, Any]:
    facts = inspected(run_dir)
    return {name: facts.get(name) for name in ("digest", "averaged_digest", "doubts")}


class Way(NamedTuple):
    """A script on ranks; ``bits`` are options with an effect on the bits."""

    ranks: int
    script: str
    words: str = ""
    bits: str = ""
    options: str = ""

    def __str__(self) -> str:
        return f"{self.script[:-3]} {self.words} {self.bits} {self.options} on {self.ranks}"


SMALL, WHOLE = "--bucket-mb 0.25", "--no-shard-optimizer"
WAYS = [
    Way(4, "everything.py", bits="--shards 5", options=SMALL),
    # Branches, sizes, and optimizers whose state is cut in different ways.
    Way(3, "ranks.py", "then=change optimizer=sgd", options=SMALL),
    Way(3, "ranks.py", "what=nan optimizer=adafactor"),
    Way(2, "ranks.py", "what=nan optimizer=tensors", options=WHOLE),
    Way(3, "ranks.py", "then=moments,change", bits="--precision bf16"),
    Way(2, "ranks.py", "loss=gather what=inf", options=WHOLE),
    # An optimizer with a second request for a gradient.
    Way(3, "ranks.py", "loss=terms optimizer=wolfe", bits="--shards 5", options=SMALL),
    # Gradients that change after they are sent.
    Way(2, "ranks.py", "deep=doubled", options=SMALL),
    Way(2, "ranks.py", "deep=checkpoints", options=SMALL),
    Way(2, "ranks.py", "deep=teacher", options=SMALL),
]


def has_the_bits_of_a_tower(way: Way, references: References, tmp_path: Path) -> Ended:
    words, bits = way.words.split(), way.bits.split()
    reference = references.on_a_tower(way.script, *words, options=(*bits,))
    options = on(way.ranks, *bits, *way.options.split(), "--run-dir", str(tmp_path / "run"))
    ended = run(command(way.script, *words, options=options))
    assert ended.code == 0, ended.said
    facts = found(tmp_path / "run")
    assert facts == {name: reference.facts.get(name) for name in facts}
    assert inspected(tmp_path / "run")["engine"] == "collective"
    assert ended.out.count(" is skipped (") == reference.out.count(" is skipped (")
    return ended


def test_ranks_of_each_kind_of_state_have_the_bits_of_a_tower(
    references: References, tmp_path: Path
) -> None:
    """Cut the state of several optimizers into small slices, for a loss over the whole batch.

    Callbacks reach the state, spread over all ranks. A single rank has the temperature.
    """
    words = "loss=gather optimizer=several then=halve,change"
    way = Way(3, "ranks.py", words, bits="--shards 5", options="--bucket-mb 0.01")
    has_the_bits_of_a_tower(way, references, tmp_path)


def test_two_ranks_have_the_bits_of_a_tower(references: References, tmp_path: Path) -> None:
    ended = has_the_bits_of_a_tower(Way(2, "ranks.py"), references, tmp_path)
    if sys.platform == "linux":
        met = "2 ranks met through a file; gloo listens on 127.0.0.1 (this machine alone)"
        assert met in ended.out


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_bits_of_a_tower(way: Way, references: References, tmp_path: Path) -> None:
    has_the_bits_of_a_tower(way, references, tmp_path)


@pytest.mark.slow
def test_it_is_told_to_end_and_killed_and_goes_on_elsewhere(
    references: References, tmp_path: Path
) -> None:
    """End a loss over the batch in its first pass, on towers, in its second, on fewer ranks."""
    run_dir = tmp_path / "run"
    saves = ("--run-dir", str(run_dir), "--save-every-steps", "1")
    towers = ("--engine", "towers", "--workers", "2")

    def goes_on(options: tuple[str, ...], *mischief: str) -> Ended:
        (tmp_path / "happened").unlink(missing_ok=True)
        words = ("loss=gather", f"folder={tmp_path}", *mischief)
        return run(command("ranks.py", *words, options=(*options, *saves)))

    first = goes_on(on(3), "what=TERM", "at=forward,1,1")
    assert first.code == 128 + signal.SIGTERM, first.said  # as for a single process
    made = inspected(run_dir)["global_step"]
    assert made in (1, 2)
    assert f"stopped after step {made}: rank 1: SIGTERM" in first.out
    assert goes_on(towers, "what=TERM", "at=forward,0,2").code != 0
    assert inspected(run_dir)["global_step"] in (2, 3)
    for path in tmp_path.glob("forked-*"):
        path.unlink()
    third = goes_on(on(3), "what=KILL", "at=backward,2,3")
    assert (third.code, len(third.err.splitlines())) == (1, 1), third.said
    assert "quorate: rank 2 was killed by signal 9 (SIGKILL)" in third.err
    last = run(command("ranks.py", "loss=gather", options=(*on(2), *saves)))
    assert last.code == 0, last.said
    tower = references.on_a_tower("ranks.py", "loss=gather").digests
    assert (found(run_dir)["digest"], found(run_dir)["averaged_digest"]) == tower


@pytest.mark.parametrize(
    ("words", "where", "saved"),
    [
        ("loss=gather what=raise at=forward,1,2", "worker 1 (cpu), step 2, shard 1, rows", 2),
        ("what=again at=,1, optimizer=wolfe", "worker 1 (cpu), step 2", 2),
        ("loss=gather what=contrast", "in contrast, of the whole", 3),
    ],
)
def test_what_user_code_raises_is_one_traceback_and_saved_before(
    words: str, where: str, saved: int, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    saves = ("--save-every-steps", "1", "--run-dir", str(tmp_path / "run"))
    more = (*words.split(), f"folder={tmp_path / 'folder'}")
    ended = run(command("ranks.py", *more, options=on(3, *saves)))
    assert (ended.code, ended.err.count("Traceback")) == (1, 1), ended.said
    assert "ValueError: mine" in ended.err
    assert where in ended.err, ended.err
    assert inspected(tmp_path / "run")["global_step"] == saved


@pytest.mark.slow
def test_what_another_rank_alone_comes_to_is_said_and_kept(tmp_path: Path) -> None:
    """A doubt of rank 1 alone, after the first step; and a doubt shown only by a comparison."""
    own = "on rank 1, forward writes last.bias (Linear) now"
    ended = run(
        command("ranks.py", "what=writes", "at=,1,", options=on(2, "--run-dir", str(tmp_path)))
    )
    assert ended.code == 0, ended.said
    *_, doubt = inspected(tmp_path)["doubts"]
    assert doubt.startswith(own)
    assert ended.out.count(f"same bits: no, because {doubt}") == 1
    assert own in (tmp_path / "metrics.jsonl").read_text()
    strict = run(command("ranks.py", "what=other", "at=,1,", options=on(2, "--strict")))
    assert strict.code == 1
    said = "strict: the same bits cannot be kept, because workers 0 and 1 give different results"
    assert said in strict.err
    assert "step 2/" not in strict.out


@pytest.mark.slow
def test_a_native_exchange_and_a_loop_after_the_first(
    references: References, tmp_path: Path
) -> None:
    native = on(2, "--exchange", "native", "--run-dir", str(tmp_path / "native"))
    around = on(2, "--run-dir", str(tmp_path / "around"))
    ended = run_all(
        {
            "native": command("ranks.py", options=native),
            "around": command("ranks.py", "what=around", options=around),
        }
    )
    assert ended["native"].code == 0, ended["native"].said
    assert "in an order that depends on the number of ranks, here 2" in ended["native"].out
    assert inspected(tmp_path / "native")["doubts"]
    assert ended["around"].code == 0, ended["around"].said
    assert "because the ranks ended with the first loop" in ended["around"].out
    expected = references.on_a_tower("ranks.py").digests
    assert found(tmp_path / "around")["digest"] == expected[0]


WRONG = {
    "what=model at=,1,": r"rank [12]: last.weight of the model is \(4, 200\)",
    "what=data at=,1,": "rank 1 differs from rank 0 in the first rows of the dataset",
    "what=rows at=,1,": "got 95 rows, expected 96",
    "what=shards at=,1,": "rank 1 differs from rank 0 in shards: got 5, expected 4",
    "then=moments optimizer=adafactor": "optimizer: the state of Adafactor was changed between up",
}


def test_wrong_set_ups_are_one_line_each() -> None:
    commands = {words: command("ranks.py", *words.split(), options=on(2)) for words in WRONG}
    for words, ended in run_all(commands).items():
        assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.said
        assert re.search(WRONG[words], ended.err), ended.err
        assert ("step 1/" in ended.out) == ("moments" in words)


# --- before the ranks have met --------------------------------------------------------------------


def test_nothing_is_left_of_ranks_that_had_not_met(tmp_path: Path) -> None:
    there, own = tmp_path / "happened", tmp_path / "tmp"
    own.mkdir()
    hangs = ("what=hang", "at=start,1,0", f"folder={tmp_path}", "size=2")
    words = command("ranks.py", *hangs, options=on(2))
    with subprocess.Popen(words, env={**os.environ, "TMPDIR": str(own)}) as first:
        try:
            soon(there.exists, limit_s=100)
        finally:
            first.kill()
    assert [path.name for path in own.glob("quorate-*")] == []


# --- torchrun -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_starts_them_anew(
    references: References, tmp_path: Path
) -> None:
    """Restart after a kill; an earlier run is moved aside once."""
    run_dir = tmp_path / "run"
    saves = ("--run-dir", str(run_dir), "--save-every-steps", "2")
    earlier = run(command("ranks.py", "steps=2", options=(*TOWER, *saves)))
    assert earlier.code == 0, earlier.said
    kill = ("what=KILL", "at=forward,1,3", f"folder={tmp_path}")
    words = command("ranks.py", *kill, options=(*saves, "--fresh"))[1:]
    ended = run(torchrun(2, *words, restarts=1))
    assert ended.code == 0, ended.said
    assert found(run_dir)["digest"] == references.on_a_tower("ranks.py").digests[0]
    assert "resumed step 2" in ended.said
    assert ended.said.count(f"moved the earlier run in {run_dir} to ") == 1  # of the first start
    if sys.platform == "linux":
        assert "gloo listens on 127.0.0.1 (this machine alone)" in ended.out


# Differences between ranks, and the message. The shell replaces $RANK.
OTHERS = {
    "PYTHONPATH={folder}/$RANK:$PYTHONPATH {run} {script}": (
        "rank 1 differs from rank 0 in the torch build: got 2.99.0, expected"
    ),
    "{run} {folder}/ranks$RANK.py": "rank 1 differs from rank 0 in the script's text: got",
    "{run} --workers 3 {script}": (
        "workers: got 3, expected 2, as torchrun has started 2 ranks; leave it to"
    ),
}


def test_an_engine_that_does_not_fit_torchrun_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 9}
    for name, value in (place | {"MASTER_ADDR": "host", "TORCHELASTIC_RUN_ID": "1"}).items():
        monkeypatch.setenv(name, f"{value}")
    assert main(command("ranks.py", options=("--engine", "towers"))[3:]) == 2
    said = "engine: got 'towers', expected collective, as torchrun has started 2"
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_of_torchrun_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "sitecustomize.py").write_text("import torch\ntorch.__version__ = '2.99.0'\n")
    for rank in (0, 1):
        text = (SCRIPTS / "ranks.py").read_text()
        (tmp_path / f"ranks{rank}.py").write_text(f"{text}# {rank}\n")
    places = {
        "run": f"exec {sys.executable} -m quorate run --devices cpu",
        "folder": tmp_path,
        "script": SCRIPTS / "ranks.py",
    }
    commands = {
        line: torchrun(2, "--no-python", "sh", "-c", line.format(**places)) for line in OTHERS
    }
    for line, ended in run_all(commands).items():
        assert ended.code == 1, ended.said  # torchrun's own
        assert "step 1/" not in ended.out
        found = {said for said in ended.said.splitlines() if said.startswith("quorate: ")}
        assert len(found) == 1, ended.said
        (said,) = found
        assert OTHERS[line] in said
        assert re.search(r"exitcode *: 2 ", ended.err), ended.err
        assert "File" not in ended.said.partition("torch/distributed/elastic")[0]
