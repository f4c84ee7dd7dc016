"""metrics.jsonl and events.jsonl: training goes on whatever happens; resumes cut both."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fits
from support.disks import disk, fill
from support.small import DATA, SecondsPass, trainer

import quorate
from quorate.services.run_directory import log_cut
from quorate.services.run_directory.log_cut import LogCut, cut


def line(step: int, **more: Any) -> bytes:
    return (json.dumps({"global_step": step, "epoch": 0, "loss": 0.25, **more}) + "\n").encode()


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in file.read_text().splitlines()]


def steps(file: Path) -> list[int]:
    return [found["global_step"] for found in lines(file)]


# --- the cut --------------------------------------------------------------------------------------


def plain_cut(data: bytes, global_step: int) -> tuple[bytes, list[bytes]]:
    """Return the kept part of a log and the damaged lines, found by parsing every line."""
    kept, damaged = [], []
    for text in data.splitlines(keepends=True):
        try:
            step = json.loads(text.decode("ascii"))["global_step"]
            if type(step) is not int:
                raise TypeError
            if step <= global_step:
                kept.append(text)
        except (ValueError, KeyError, TypeError):
            if text.endswith(b"\n"):
                damaged.append(text)
    return b"".join(kept), damaged


def odd_line(chance: random.Random) -> bytes:
    whole = line(chance.randrange(60))
    return chance.choice(
        [
            *(whole, line(chance.randrange(60), text="\u2028 \x85 ü")),
            *(b'{"epoch": 1, "global_step": 3}\n', b'{"global_step": 3}\n', b"\n", b"[]\n"),
            b'{"global_step": true, "a": 1}\n',
            b'{"global_step": 3.0, "a": 1}\n',
            b'{"global_step": -1, "a": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"}\n',
            b'{"global_step": , "a": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"}\n',
            b'{"global_step": 99999999999999999999999999, "a": "bbbbbb"}\n',
            *(b"\x00" * 40 + b"\n", b"\xff\xfe" + whole, whole.replace(b"l", b"\xec")),
            whole[: chance.randrange(len(whole))] + b"\n",
        ]
    )


@pytest.mark.parametrize("block_bytes", [16, 1 << 18])
def test_a_cut_log_is_what_parsing_every_line_gives(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_cut, "BLOCK_BYTES", block_bytes)
    chance = random.Random(block_bytes)
    path, beside, real = (tmp_path / name for name in ("log", "log.damaged", "elsewhere"))
    path.symlink_to(real)
    real.touch(0o640)
    if os.geteuid() == 0:
        os.chown(real, 12, 34)
    before = real.stat()
    for _ in range(120):
        count = chance.randrange(30)
        first = chance.randrange(40)
        data = b"".join(line(first + n) for n in range(count))  # as written by a run
        if chance.random() < 0.5:  # two interleaved runs, hands, kills, flipped bits
            texts = data.splitlines(keepends=True) + [odd_line(chance) for _ in range(5)]
            chance.shuffle(texts)
            data = b"".join(texts)
        if chance.random() < 0.5:
            data = data[: chance.randrange(len(data) + 1)]
        global_step = chance.randrange(70)
        path.write_bytes(data)
        beside.unlink(missing_ok=True)
        done = cut(path, global_step)
        kept, damaged = plain_cut(data, global_step)
        assert path.read_bytes() == kept
        assert done == LogCut(len(damaged), kept_in=beside if damaged else None)
        assert (beside.read_bytes() if damaged else b"") == b"".join(damaged)
        assert set(tmp_path.iterdir()) <= {path, beside, real}
        assert path.is_symlink()
        for name in ("st_mode", "st_uid", "st_gid"):
            assert getattr(real.stat(), name) == getattr(before, name)


# --- the log of a run -----------------------------------------------------------------------------


def test_a_damaged_log_keeps_no_run_from_going_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "metrics.jsonl"

    def go_on(count: int) -> str:
        trainer(tmp_path, summary_every_s=None).fit(DATA, steps=count)
        return capsys.readouterr().out

    go_on(2)
    data = bytearray(file.read_bytes())
    data[data.index(b"loss")] ^= 0x80
    file.write_bytes(data)
    assert go_on(4).count("metrics.jsonl: moved 1 damaged line to ") == 1
    assert steps(file) == [2, 3, 4]
    file.write_bytes(b"")
    os.truncate(file, 1 << 40)
    said = "metrics.jsonl is damaged or not a log; moved the file to "
    assert go_on(6).count(said) == 1
    assert steps(file) == [5, 6]
    assert len([path for path in tmp_path.glob(f"{file.name}.*") if path.stat().st_size]) == 2


def test_lines_wait_while_a_disk_is_full_and_none_is_torn_or_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with disk(tmp_path / "disk", "1m") as place:
        file, torn = place / "run" / "metrics.jsonl", []

        def call(step: int) -> None:
            if step in (2, 60):
                fill(place)
            if step == 40:
                torn.append(not file.read_bytes().endswith(b"\n"))  # the rest waits
                (place / "filler").unlink()

        made = trainer(place / "run", 1, summary_every_s=None)
        with pytest.raises(OSError, match="step 90 is not saved"):
            made.fit(DATA, steps=90, callbacks=[SecondsPass(monkeypatch, call)])
        out = capsys.readouterr().out
        assert torn == [True]
        whole = file.read_bytes().splitlines(keepends=True)
        whole = [text for text in whole if text.endswith(b"\n")]
        count = len(whole)
        assert [json.loads(text)["global_step"] for text in whole] == [*range(1, count + 1)]
        assert 60 <= count < 90
        assert "metrics.jsonl cannot be written, training continues: [Errno 28]" in out
        assert out.count("metrics.jsonl can be written again") == 1
        lacks = f"metrics.jsonl lacks the last {90 - count} lines: [Errno 28] No space left"
        assert out.count(lacks) == 1


def test_numbers_times_and_what_workers_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set the clock back by a day meanwhile: no line shows the change."""
    today = time.time
    odd = {"nan": float("nan"), "most": float("inf"), "least": -float("inf"), "sound": 0.5}

    def loss(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": fits.squares(model, batch), **(odd if not model.training else {})}

    def call(step: int) -> None:
        monkeypatch.setattr(time, "time", lambda: today() - 86_400)

    begun, validation = today(), quorate.Validation(fits.rows(12), every_steps=40)
    passes = SecondsPass(monkeypatch, call)
    settings = {"validation": validation, "callbacks": [passes], "workers": 2}
    fits.fit(loss=loss, run_dir=tmp_path, steps=40, **settings)
    refused: list[str] = []
    text = (tmp_path / "metrics.jsonl").read_text()
    found = [json.loads(each, parse_constant=refused.append) for each in text.splitlines()]
    assert refused == []
    read = found.pop()["validation"]
    assert [read[name] for name in odd] == ["NaN", "Infinity", "-Infinity", 0.5]
    times = [each["at"] for each in found]
    assert times == sorted(times)
    assert begun <= times[0] < times[-1] <= begun + 40 * 1.2 + 60
    assert ["begun_at" in each for each in found] == [True] + [False] * 39
    spent = [each["spent"] for each in found if "spent" in each]
    assert 3 < len(spent) < 40  # each second at first, and more rarely then
    sums = [sum(each["shards"]) for each in spent]
    assert sums == sorted(sums)
    assert sums[-1] > 100  # of 160, as of the last line with times
    assert all(len(seconds) == 2 and min(seconds) >= 0 for seconds in spent[-1].values())


# --- events.jsonl ---------------------------------------------------------------------------------


def test_a_fit_logs_its_start_saves_evaluations_and_its_end(tmp_path: Path) -> None:
    fits.fit(run_dir=tmp_path, steps=5, validation=fits.rows(12), save_every_steps=3, workers=1)
    found = lines(tmp_path / "events.jsonl")
    kinds = [event["kind"] for event in found]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    assert found[0]["settings"]["shards"] == 4
    assert [event["saved_step"] for event in found if event["kind"] == "save"] == [3, 5]
    [evaluation] = [event for event in found if event["kind"] == "evaluation"]
    assert evaluation["text"].startswith("epoch 1: validation  loss ")
    assert evaluation["global_step"] == 5
    assert found[-1]["state"] == "finished"
    assert found[-1]["spent"]["shards"]


def test_a_resumed_run_continues_the_log_and_a_fresh_one_moves_it_aside(tmp_path: Path) -> None:
    def fit(count: int, **options: Any) -> list[str]:
        trainer(tmp_path, 1, summary_every_s=None, **options).fit(DATA, steps=count)
        return file.read_text().splitlines() if file.is_file() else []

    file = tmp_path / "events.jsonl"
    before = fit(2)
    assert fit(2) == before  # there was nothing to do
    with file.open("a") as opened:
        opened.write('{"at": 5, "global')  # as left by a full disk and a kill
    after = fit(4)
    assert after[: len(before) + 1] == [*before, '{"at": 5, "global']
    later = [json.loads(text) for text in after[len(before) + 1 :]]
    assert (later[0]["kind"], later[0]["global_step"]) == ("start", 2)
    [resume] = [event for event in later if event["kind"] == "resume"]
    assert resume["text"].startswith("resumed step 2 ")
    anew = [json.loads(text)["kind"] for text in fit(2, fresh=True)]
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]
    assert steps(tmp_path / "aside-1" / "metrics.jsonl") == [1, 2, 3, 4]
    assert (tmp_path / "aside-1" / "events.jsonl").read_text().splitlines() == after
    assert anew.count("start") == 1
