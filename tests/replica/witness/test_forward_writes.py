"""Trained parameters that forward writes: plain torch's values, on any number of workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import front_door
from support.references import References
from support.runs import SCRIPTS, command, inspected, last_json, run

import quorate
from quorate.replica.digest import digest

sys.path.insert(0, str(SCRIPTS))
import forward_writes

STEPS = 12
# What the rows of a batch determine differs from shard to shard.
SAME_FOR_ALL_ROWS = [kind for kind in forward_writes.KINDS if kind != "actnorm"]


def trained(kind: str, workers: int = 1, steps: int = STEPS, **options: Any) -> quorate.Trainer:
    trainer = front_door.trainer(
        forward_writes.made(kind),
        options.pop("loss", forward_writes.loss),
        optimizer=forward_writes.optimizer,
        batch_size=forward_writes.BATCH,
        shards=4,
        devices="cpu",
        workers=workers,
        engine="towers",
        **options,
    )
    for _ in trainer.updates(forward_writes.rows(kind), steps=steps, shuffle=False):
        pass
    return trainer


def digest_of(trainer: quorate.Trainer) -> str:
    return digest(trainer.model.state_dict().items())


@pytest.mark.parametrize("kind", SAME_FOR_ALL_ROWS)
def test_as_a_loop_of_plain_torch_on_any_number_of_towers(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = forward_writes.plain(kind, STEPS)
    trainer = trained(kind)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value, atol=2e-6, rtol=0)
    for workers in (2, 3):
        assert digest_of(trained(kind, workers)) == digest_of(trainer)
    said = caplog.text
    assert "forward writes" in said
    assert "same bits: no" not in said


def test_a_write_is_found_in_a_process_that_has_compiled_something(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else one tower's first write would race with what others compute."""
    torch.compile(torch.neg, backend="aot_eager")(torch.ones(2))
    trained("later", 2, steps=1)  # which clamps nothing yet
    assert "forward writes" in caplog.text


def test_what_the_rows_determine_is_the_first_shards() -> None:
    """The first shard of the first step initialises, as its own loop would."""
    trainer = trained("actnorm", steps=1)
    model = forward_writes.made("actnorm")
    x, y = forward_writes.rows("actnorm").tensors
    quarter = forward_writes.BATCH // 4
    for start in range(0, forward_writes.BATCH, quarter):  # each initialises by its own rows
        alone = forward_writes.made("actnorm")
        part = [x[start : start + quarter], y[start : start + quarter]]
        (forward_writes.loss(alone, part) / 4).backward()
        if start == 0:
            model.load_state_dict(alone.state_dict())
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            mine.grad = theirs.grad if mine.grad is None else mine.grad + theirs.grad
    forward_writes.optimizer(model.parameters()).step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value, atol=1e-6, rtol=0)
    expected = digest_of(trained("actnorm"))
    assert [digest_of(trained("actnorm", workers)) for workers in (2, 3)] == [expected] * 2


def test_bf16_and_an_average() -> None:
    options: dict[str, Any] = {"precision": "bf16"}
    first = digest_of(trained("renorm", **options))
    assert digest_of(trained("renorm", 3, **options)) == first


def test_after_a_resume(tmp_path: Path) -> None:
    trained("renorm", 2, steps=5, run_dir=tmp_path).save()
    assert digest_of(trained("renorm", 3, run_dir=tmp_path)) == digest_of(trained("renorm"))


def test_an_evaluation_changes_nothing() -> None:
    trainer = trained("renorm")
    before = digest_of(trainer)
    trainer.evaluate(forward_writes.rows("renorm"))
    assert digest_of(trainer) == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["renorm", "embedding", "data", "actnorm"])
def test_on_worker_processes_one_of_which_is_killed(
    kind: str, tmp_path: Path, references: References
) -> None:
    if not Path("/proc/self/environ").exists():
        pytest.skip("looks into /proc")
    expected = references.on_a_tower("forward_writes.py", kind, str(STEPS))
    options = ("--workers", "2", "--engine", "processes", "--run-dir", str(tmp_path / "run"))
    for steps in ("5", str(STEPS)):  # the second one resumes
        words = command("forward_writes.py", kind, steps, str(tmp_path / "killed"), options=options)
        ended = run(words)
        assert ended.code == 0, ended.said
    assert (tmp_path / "killed").exists()
    found = inspected(tmp_path / "run")
    assert (found["digest"], found["same_bits"]) == (expected.facts["digest"], True)
    assert last_json(ended.out) == expected.json[5:]
