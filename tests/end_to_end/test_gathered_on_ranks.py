"""Losses over the whole batch on ranks of a collective: the bits of a tower, and how they end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed
from support.references import References
from support.runs import Ended, command, digests, run

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="ranks are forked"),
    pytest.mark.slow,
]

STEPS = "9"  # three epochs


def on_ranks(number: int, run_dir: Path, *words: str, options: tuple[str, ...] = ()) -> Ended:
    more = (str(run_dir), STEPS, *words)
    return run(command("gathered.py", "collective", str(number), *more, options=options))


def digest_in(text: str) -> str:
    (line,) = re.findall(r"^digest (\w+)$", text, re.MULTILINE)
    return str(line)


def tower(references: References, *words: str, options: tuple[str, ...] = ()) -> str:
    return digest_in(
        references.on_a_tower("gathered.py", "towers", "1", *words, options=options).out
    )


@pytest.mark.parametrize("shards", [4, 5])
def test_one_digest_on_any_number_of_ranks(
    shards: int, references: References, tmp_path: Path
) -> None:
    bits = ("--shards", str(shards))
    expected = tower(references, options=bits)
    for number in (1, 2, 3):
        ended = on_ranks(number, tmp_path / str(number), options=bits)
        assert ended.code == 0, ended.said
        assert digest_in(ended.out) == expected, number


def test_one_digest_whatever_the_way_of_the_exchange_and_resumed_on_processes(
    references: References, tmp_path: Path
) -> None:
    """Slices of a few blocks, in which the temperature is one rank's; whole states; half of it."""
    expected = tower(references)
    for number, words in enumerate([("--bucket-mb", "0.01"), ("--no-shard-optimizer",)]):
        ended = on_ranks(3, tmp_path / str(number), options=words)
        assert ended.code == 0, ended.said
        assert digest_in(ended.out) == expected, words
    half = ("gathered.py", "collective", "2", str(tmp_path / "half"), "4")  # in mid-epoch
    assert run(command(*half)).code == 0
    rest = run(command("gathered.py", "processes", "3", str(tmp_path / "half"), STEPS))
    assert digest_in(rest.out) == expected


def test_updates_that_are_skipped_as_the_loss_of_the_batch_is_not_finite(
    references: References, tmp_path: Path
) -> None:
    words = (str(tmp_path / "tower"), STEPS, str(tmp_path), "inf")
    expected = tower(references, *words)
    ended = on_ranks(2, tmp_path / "ranks", str(tmp_path), "inf")
    assert ended.code == 0, ended.said
    assert digest_in(ended.out) == expected
    assert ended.out.count(" is skipped (") == 3, ended.out


@pytest.mark.parametrize("place", ["represent", "contrast"])
def test_what_user_code_raises_is_one_traceback_and_the_run_goes_on_from_there(
    place: str, references: References, tmp_path: Path
) -> None:
    ended = on_ranks(2, tmp_path / "run", str(tmp_path), place)
    assert (ended.code, ended.err.count("Traceback")) == (1, 1), ended.said
    assert "ValueError: mine" in ended.err
    where = {
        "represent": "worker 0 (cpu), step 2, shard 0",
        "contrast": "in contrast, of the whole",
    }
    assert where[place] in ended.err
    assert "saved step 2" in ended.out
    rest = on_ranks(3, tmp_path / "run")
    assert digest_in(rest.out) == tower(references)


@pytest.mark.parametrize("number", ["1", "2"])
def test_one_digest_after_ranks_were_killed_in_either_pass(
    number: str, references: References, tmp_path: Path
) -> None:
    saves = ("--save-every-steps", "1")
    for rank in (1, 2):  # each rank but the first is killed once
        ended = on_ranks(3, tmp_path / "run", str(tmp_path), number, options=saves)
        assert ended.code != 0
        assert "was killed by signal 9" in ended.err
        assert len([*tmp_path.glob("killed-*")]) >= rank
        if len([*tmp_path.glob("killed-*")]) == 2:
            break
    last = on_ranks(2, tmp_path / "run", str(tmp_path), number, options=saves)
    assert last.code == 0, last.said
    assert digest_in(last.out) == tower(references)
    assert digests(tmp_path / "run")
