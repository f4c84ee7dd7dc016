"""The beginning of a run: afresh beside an old one, or from weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.digests import digest_of
from support.messages import expect_error
from support.small import DATA, Small, trainer

from quorate.errors import CheckpointError
from quorate.services.checkpoints import files


def test_fresh_moves_the_old_run_aside(tmp_path: Path) -> None:
    for number in (1, 2):
        run = trainer(tmp_path, fresh=True)
        run.fit(DATA, steps=3 * number)
        assert run.global_step == 3 * number
    aside = tmp_path / "aside-1"
    old, new = files.find(aside), files.find(tmp_path)
    assert old is not None
    assert new is not None
    assert (old.record["global_step"], new.record["global_step"]) == (3, 6)
    assert len((aside / "metrics.jsonl").read_text().splitlines()) == 3
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6
    trainer(tmp_path).fit(DATA, steps=7)
    assert not (tmp_path / "aside-2").exists()


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("kind", ["pt", "nested", "safetensors"])
def test_weights_of_plain_torch_are_a_beginning(prefix: str, kind: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(9)
    source = Small()
    named = {prefix + name: value for name, value in source.state_dict().items()}
    path = tmp_path / f"weights.{'safetensors' if kind == 'safetensors' else 'pt'}"
    if kind == "safetensors":
        save_file(named, path)
    else:
        torch.save(named if kind == "pt" else {"epoch": 3, "state_dict": named}, path)
    run = trainer(None, init_from=path)
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, source.state_dict()[name])


def test_weights_of_a_run_are_a_beginning(tmp_path: Path) -> None:
    first = trainer(tmp_path / "first")
    first.fit(DATA, steps=3)
    second = trainer(tmp_path / "second", init_from=tmp_path / "first")
    for name, value in second.model.state_dict().items():
        assert torch.equal(value, first.model.state_dict()[name])
    second.fit(DATA, steps=2)
    assert second.global_step == 2
    resumed = trainer(tmp_path / "second", init_from=tmp_path / "first")
    resumed.fit(DATA, steps=4)
    whole = trainer(tmp_path / "whole", init_from=tmp_path / "first", workers=1)
    whole.fit(DATA, steps=4)
    assert digest_of(resumed) == digest_of(whole)


def test_weights_that_do_not_fit_are_named_with_both_shapes(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"first.weight": torch.zeros(2, 2), "extra": torch.zeros(1)}, path)
    with expect_error(CheckpointError, name=f"weights of {path}"):
        trainer(None, init_from=path)
    torch.save(Small(), path)  # a pickle of a class: nothing in it is run
    with expect_error(CheckpointError, hide=r"(?<=got ).*(?=, expected a)"):
        trainer(None, init_from=path)
    with expect_error(CheckpointError):
        trainer(None, init_from=tmp_path / "nothing.pt")
    path.write_bytes(b"no weights")
    with expect_error(CheckpointError):
        trainer(None, init_from=path)
