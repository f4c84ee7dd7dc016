"""``quorate doctor SCRIPT``: what its model takes of a device, and which cut fits two."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.warm import WARM

from quorate.commands.doctor.model.measured import Measured
from quorate.commands.doctor.model.table import fits, said, shown
from quorate.commands.main import main
from quorate.replica.pipeline.measure import Cost

SCRIPTS = Path(__file__).parents[1] / "scripts"
MIB = 1 << 20

# Four parts of 1 MiB: with gradients and two vectors of Adam 4 MiB each, and 1 MiB of activations.
PART = Cost(0.001, 0.003, MIB, MIB, MIB // 2, MIB // 2)
MADE = Measured("cpu", 40 * MIB, 8, 1, 4 * MIB, 4 * MIB, 8 * MIB, ["b", "c", "d"], [PART] * 4, "")


def test_what_fits_is_said() -> None:
    assert [*said(MADE)] == [
        "1 device: needs 20.0 MiB, has 40.0 MiB: it fits",
        "2 devices: cut before c: 12.0 MiB + 10.0 MiB, 50% + 50% of the time",
        "3 devices: cut before b and c: 7.0 MiB + 6.0 MiB + 10.0 MiB, 25% + 25% + 50% of the time",
        "4 devices: cut before b, c and d: 8.0 MiB + 7.0 MiB + 6.0 MiB + 5.0 MiB, "
        "25% + 25% + 25% + 25% of the time",
    ]
    assert fits(MADE)
    assert shown(MADE, "train.py").startswith(
        "train.py: time and memory of one shard of 8 rows on cpu\n\nfrom module "
    )


def test_a_cut_that_does_not_fit_is_none() -> None:
    small = replace(MADE, memory_bytes=13 * MIB)
    assert [line.partition(":")[0] for line in said(small)] == [
        f"{n} devices" if n > 1 else "1 device" for n in (1, 2, 3, 4)
    ]
    assert next(said(small)) == "1 device: needs 20.0 MiB, has 13.0 MiB: it does not fit"
    assert fits(small)
    # The first stage has two shards under way: its share is smaller than half.
    smaller = replace(MADE, memory_bytes=11 * MIB)
    assert [*said(smaller)][1] == "2 devices: no cut of the model fits them"
    assert not fits(smaller)
    uneven = replace(
        MADE, memory_bytes=15 * MIB, costs=[PART, PART, replace(PART, forward_s=1.0), PART]
    )
    assert "cut before b:" not in [*said(replace(uneven, memory_bytes=14 * MIB))][1]


def test_a_model_that_cannot_be_cut() -> None:
    whole = replace(MADE, names=[], costs=[], why_not="forward sets calls")
    assert [*said(whole)] == [
        "1 device: needs 16.0 MiB and the activations of a shard, has 40.0 MiB: it fits",
        "the model cannot be cut: forward sets calls",
    ]
    assert not fits(replace(whole, memory_bytes=15 * MIB))


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    MADE.write(tmp_path / "file")
    assert Measured.from_json(json.loads((tmp_path / "file").read_text())) == MADE


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "script: got 'nowhere.py', expected a Python file"),
        (["--workers", "2", "train.py"], "workers: got '2', expected none with a script; leave it"),
        (["train.py", "--run-dir", "x"], "run_dir: got 'x', expected none with a script; leave"),
    ],
)
def test_what_does_not_go_with_a_script(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_script() -> None:
    words = ["doctor", "--json", "--devices", "cpu", str(SCRIPTS / "everything.py")]
    code, out, err = WARM.run(words, os.environ, 120)
    assert code == 0, out + err
    found = json.loads(out)
    assert found["names"] == ["norm", "embedding", "lstm", "dropout", "classes", "words"]
    assert found["rows"] == 6
    assert found["calls"] == 1
    # Adam: two vectors and a step of each parameter, but not of those that nobody uses.
    assert 1.9 < found["optimizer_bytes"] / found["trained_bytes"] < 2.1
    assert sum(cost["parameter_bytes"] for cost in found["costs"]) == found["parameter_bytes"]
    lstm = found["costs"][found["names"].index("lstm") + 1]
    assert lstm["kept_bytes"] == max(cost["kept_bytes"] for cost in found["costs"])
    assert found["works"]
    assert found["said"][1].startswith("2 devices: cut before ")
