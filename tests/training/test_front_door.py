"""The front door: groups of settings, their shorthands, what the command overrides, what moved."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from support.digests import digest_of
from support.messages import expect_error
from support.small import DATA, Small, loss
from torch.utils.data import Subset, TensorDataset

import quorate
from quorate.errors import CheckpointError, DataError, SettingError
from quorate.replica.digest import digest
from quorate.settings import AtResume, options, overriding, resolved
from quorate.training.recipe import OPTIONS

GROUPS = (
    quorate.Compute,
    quorate.Loading,
    quorate.Optimize,
    quorate.RunDir,
    quorate.Validation,
    quorate.Workers,
)


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def small(**keywords: Any) -> quorate.Trainer:
    given: dict[str, Any] = {
        "optimizer": quorate.Optimize(adamw, ema_decay=0.9),
        "batch_size": 12,
        "shards": 4,
        "devices": "cpu",
        "workers": quorate.Workers(2, engine="towers"),
    }
    return quorate.Trainer(Small, loss, **given | keywords)


# --- groups ---------------------------------------------------------------------------------------


def test_everything_at_once(tmp_path: Path) -> None:
    trainer = quorate.Trainer(
        Small,
        loss,
        totals={},
        optimizer=quorate.Optimize(
            adamw,
            schedule=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 5),
            clip_norm=1.0,
            ema_decay=0.9,
            nonfinite="skip",
        ),
        batch_size=12,
        shards=4,
        seed=1,
        devices="cpu",
        workers=quorate.Workers(2, engine="towers", threads=1, timeout_s=900, memory_fraction=0.4),
        update="quorum:3",
        precision="fp32",
        compute=quorate.Compute(compile=False, soft_placement=False, log_placement=False),
        loading=quorate.Loading(
            collate=torch.utils.data.default_collate,
            augment=lambda batch, draws: batch,
            order=lambda rows: rows,
            processes=0,
        ),
        run_dir=quorate.RunDir(
            tmp_path, save_every_s=60, keep=3, keep_every_h=1, summary_every_s=20, fresh=False
        ),
    )
    trainer.fit(
        DATA,
        epochs=2,
        callbacks=[quorate.Callback()],
        max_time_s=3600,
        validation=quorate.Validation(DATA, every_epochs=1, best="min:loss"),
    )
    assert trainer.global_step == 2 * trainer.updates_per_epoch(DATA)
    assert trainer.run_dir == tmp_path


def test_a_plain_value_is_its_group() -> None:
    assert resolved(quorate.Workers, 4) == quorate.Workers(4) == quorate.Workers(count=4)
    assert quorate.Workers("4").count == quorate.Workers("4:4").count == 4
    assert quorate.Workers(" 2:8").bounds() == (2, 8)
    assert resolved(quorate.Workers, None) == quorate.Workers()
    assert resolved(quorate.Optimize, adamw) == quorate.Optimize(adamw)
    assert resolved(quorate.RunDir, "runs/a") == quorate.RunDir(Path("runs/a"))
    group = quorate.RunDir("runs/a", keep=1)
    assert resolved(quorate.RunDir, group) is group


def test_groups_are_frozen_and_say_what_they_are() -> None:
    for group in GROUPS:
        assert group.__doc__ is not None
        described = {name.partition(":")[0].strip() for name in group.__doc__.splitlines()}
        assert {f.name for f in fields(group)} <= described, group
    with pytest.raises(FrozenInstanceError):
        quorate.Workers(2).count = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "got", "make"),
    [
        ("workers", 0, lambda: quorate.Workers(0)),
        ("workers", 0, lambda: quorate.Workers("0:2")),
        ("workers", "3:2", lambda: quorate.Workers("3:2")),
        ("workers", "two", lambda: quorate.Workers("two")),
        ("workers", "1:2:3", lambda: quorate.Workers("1:2:3")),
        ("workers", "2:", lambda: quorate.Workers("2:")),
        ("threads", 0, lambda: quorate.Workers(threads=0)),
        ("Workers.timeout_s", 0, lambda: quorate.Workers(timeout_s=0)),
        ("optimizer", "int", lambda: quorate.Optimize(5)),
        ("clip_norm", -1, lambda: quorate.Optimize(adamw, clip_norm=-1)),
        ("ema_decay", 1.0, lambda: quorate.Optimize(adamw, ema_decay=1.0)),
        ("nonfinite", "ignore", lambda: quorate.Optimize(adamw, nonfinite="ignore")),
        ("Loading.processes", -1, lambda: quorate.Loading(processes=-1)),
        ("collate", "int", lambda: quorate.Loading(collate=5)),
        ("run_dir", 5, lambda: quorate.RunDir(5)),
        ("keep", 0, lambda: quorate.RunDir("a", keep=0)),
        ("save_every_s", 0, lambda: quorate.RunDir("a", save_every_s=0)),
        ("every_steps", 0, lambda: quorate.Validation(DATA, every_steps=0)),
        ("best", "loss", lambda: quorate.Validation(DATA, best="loss")),
    ],
)
def test_a_group_checks_itself(name: str, got: object, make: Any) -> None:
    with expect_error(SettingError, name=name, got=got):
        make()


def test_none_is_allowed_where_it_means_something() -> None:
    assert quorate.RunDir("a", save_every_s=None, summary_every_s=None).save_every_s is None
    with overriding({"summary_every_s": "none", "run_dir": "none"}):  # as typed at the command
        typed = resolved(quorate.RunDir, None)
    assert (typed.summary_every_s, typed.path) == (None, Path("none"))
    with expect_error(SettingError, name="keep"):
        quorate.RunDir("a", keep=None)  # type: ignore[arg-type]


def test_a_validation_set_is_a_dataset() -> None:
    with expect_error(DataError, name="validation", got="0 rows"):
        quorate.Validation(Subset(DATA, []))


# --- the command ----------------------------------------------------------------------------------


def test_what_is_typed_beats_what_is_passed() -> None:
    typed = {"workers": 3, "threads": 2, "clip_norm": 0.5, "save_every_s": 5.0, "update": "async"}
    with overriding(typed):
        workers = resolved(quorate.Workers, quorate.Workers(2, engine="towers"))
        assert workers == quorate.Workers(3, engine="towers", threads=2)
        assert resolved(quorate.Optimize, adamw) == quorate.Optimize(adamw, clip_norm=0.5)
        assert resolved(quorate.RunDir, None).save_every_s == 5.0
        assert len(small()._crew.groups) == 3
    with overriding({"threads": 0}), expect_error(SettingError, name="threads", got=0):
        small()


def test_every_setting_is_declared_once() -> None:
    names = [option.name for group in GROUPS for option in options(group).values()]
    assert len(names) == len(set(names))
    for option in OPTIONS.values():
        assert option.help
        assert option.help[0].islower() or option.help.startswith("(")
        assert option.place.endswith("=)")


# --- what has moved -------------------------------------------------------------------------------

MOVED = {
    "schedule": "Optimize(schedule=)",
    "clip_norm": "Optimize(clip_norm=)",
    "ema_decay": "Optimize(ema_decay=)",
    "nonfinite": "Optimize(nonfinite=)",
    "engine": "Workers(engine=)",
    "threads": "Workers(threads=)",
    "worker_timeout_s": "Workers(timeout_s=)",
    "memory_fraction": "Workers(memory_fraction=)",
    "compile": "Compute(compile=)",
    "soft_placement": "Compute(soft_placement=)",
    "log_placement": "Compute(log_placement=)",
    "collate": "Loading(collate=)",
    "augment": "Loading(augment=)",
    "order": "Loading(order=)",
    "loader_workers": "Loading(processes=)",
    "save_every_s": "RunDir(save_every_s=)",
    "save_every_steps": "RunDir(save_every_steps=)",
    "keep": "RunDir(keep=)",
    "keep_every_h": "RunDir(keep_every_h=)",
    "summary_every_s": "RunDir(summary_every_s=)",
    "fresh": "RunDir(fresh=)",
    "init_from": "RunDir(init_from=)",
    "max_time_s": "fit(max_time_s=)",
    "callbacks": "fit(callbacks=)",
}


@pytest.mark.parametrize(("name", "place"), MOVED.items())
def test_a_former_keyword_names_its_new_place(name: str, place: str) -> None:
    with expect_error(SettingError, name=name, got=None, expected=place):
        small(**{name: None})


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("evaluate_every_epochs", "Validation(every_epochs=)"),
        ("evaluate_every_steps", "Validation(every_steps=)"),
        ("best", "Validation(best=)"),
    ],
)
def test_a_former_keyword_of_fit_too(name: str, place: str) -> None:
    with expect_error(SettingError, name=name, got=1, expected=place):
        small().fit(DATA, **{name: 1})


@pytest.mark.parametrize("name", ["lr", "max_epochs", "accelerator", "train_dataset", "fp16"])
def test_a_keyword_of_another_trainer_names_the_one_here(name: str) -> None:
    callables = {"Trainer": quorate.Trainer, "fit": quorate.Trainer.fit}
    with expect_error(SettingError, name=name) as raised:
        small(**{name: 1})
    place = re.match(r"(\w+)\((\w+)", str(raised.value.expected))
    assert place is not None
    assert place[2] in inspect.signature(callables[place[1]]).parameters


def test_an_optimizer_in_the_place_of_its_function_is_answered_with_the_function() -> None:
    made = torch.optim.RMSprop([torch.nn.Parameter(torch.ones(1))], lr=0.25)
    with expect_error(SettingError, name="optimizer") as raised:
        small(optimizer=made)
    _, _, typed = raised.value.fix.partition("pass optimizer=")
    assert typed == "lambda parameters: torch.optim.RMSprop(parameters, lr=0.25)"
    small(optimizer=eval(typed)).fit(DATA)


def test_a_mistyped_keyword_is_one_line() -> None:
    with expect_error(SettingError, name="shard", got=4):
        small(shard=4)
    with expect_error(SettingError, name="epoch", got=4):
        small().fit(DATA, epoch=4)


# --- questions ------------------------------------------------------------------------------------


def ask_everything(trainer: quorate.Trainer) -> Iterator[Any]:
    fewer = TensorDataset(*(tensor[:2] for tensor in DATA.tensors))
    yield trainer.updates_per_epoch(DATA)
    with suppress(SettingError):  # fewer rows than shards, once their number is known
        trainer.updates_per_epoch(fewer)
    yield trainer.evaluate(DATA)
    yield trainer.evaluate(fewer)
    yield trainer.global_step
    yield trainer.averaged_model
    yield trainer.summaries
    yield trainer.workers
    yield trainer.run_dir
    yield trainer.model
    trainer.stop("nothing runs")
    yield repr(trainer)


@pytest.mark.parametrize("shards", [4, None])
def test_questions_leave_the_trainer_as_it_was(shards: int | None, tmp_path: Path) -> None:
    def trained(*, asks: bool, path: Path) -> str:
        trainer = small(shards=shards, workers=quorate.Workers(3, engine="towers"), run_dir=path)
        for steps in (3, 8):
            if asks:
                assert len(list(ask_everything(trainer))) == 10
            trainer.fit(DATA, steps=steps)
            if asks:
                assert trainer.save().exists()
        for number, _ in enumerate(trainer.updates(DATA, steps=12)):
            if asks and number == 1:
                list(ask_everything_but_stop(trainer))
        if asks:
            list(ask_everything(trainer))
        return digest_of(trainer)

    def ask_everything_but_stop(trainer: quorate.Trainer) -> Iterator[Any]:
        yield trainer.updates_per_epoch(TensorDataset(*(t[:5] for t in DATA.tensors)))
        yield trainer.evaluate(DATA)
        yield [worker.number for worker in trainer.workers]
        yield trainer.averaged_model

    asked = trained(asks=True, path=tmp_path / "asked")
    assert asked == trained(asks=False, path=tmp_path / "silent")


def test_the_workers_of_a_loop_are_shown_while_it_runs() -> None:
    trainer = small()
    assert trainer.workers == []
    for _ in trainer.updates(DATA, steps=2):
        assert [worker.number for worker in trainer.workers] == [0, 1]
        assert all(worker.device == "cpu" for worker in trainer.workers)
    assert trainer.workers == []


# --- a resume, weights, names ---------------------------------------------------------------------


def test_what_a_resume_compares_follows_from_the_fields() -> None:
    def recorded(at_resume: AtResume) -> set[str]:
        return {option.recorded for option in OPTIONS.values() if option.at_resume is at_resume}

    refused = {"seed", "shards", "batch_size", "is_ordered", "update", "last", "sampling"}
    said = {"threads", "clip_norm", "ema_decay", "is_augmented", "precision"}
    said |= {"compile", "deterministic"}
    assert recorded(AtResume.REFUSED) == refused
    assert recorded(AtResume.SAID) == said


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    small(run_dir=tmp_path).fit(DATA, steps=1)
    with expect_error(CheckpointError):
        small(run_dir=tmp_path, seed=1).fit(DATA, steps=2)


def test_weights_of_a_run_for_any_model(tmp_path: Path) -> None:
    trainer = small(run_dir=tmp_path)
    trainer.fit(DATA, steps=2)
    model = quorate.load_weights(Small(), tmp_path)
    assert isinstance(model, Small)
    assert digest(model.state_dict().items()) == digest(trainer.model.state_dict().items())


def test_importing_loads_nothing_large() -> None:
    check = (
        "import sys, quorate, quorate.training.recipe;"
        "large = {'torch', 'numpy', 'rich', 'tensorboard'} & sys.modules.keys();"
        "assert not large, large;"
        "assert set(quorate.__all__) <= set(dir(quorate));"
        "assert all(getattr(quorate, name) for name in quorate.__all__)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'quorate' has no attribute 'Trainor'"):
        _ = quorate.Trainor  # type: ignore[attr-defined]
