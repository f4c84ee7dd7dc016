"""The front door: groups of settings, their shorthands, overriding by the command, moved names."""

import inspect
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.digests import digest, digest_of
from support.messages import expect_error
from support.runs import command, inspected, run
from support.small import DATA, Small, loss
from torch.utils.data import TensorDataset

import quorate
from quorate.callbacks import EarlyStopping, LearningRateMonitor, ReduceLROnPlateau
from quorate.errors import CheckpointError, SettingError

GROUPS = (
    *(quorate.Compute, quorate.Loading, quorate.Optimize, quorate.RunDir),
    *(quorate.Validation, quorate.Workers),
)
adamw = partial(torch.optim.AdamW, lr=0.01)


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


def test_a_plain_value_is_its_group(tmp_path: Path) -> None:
    assert quorate.Workers(4) == quorate.Workers(count=4)
    assert quorate.Workers("4").count == quorate.Workers("4:4").count == 4
    assert quorate.Workers(" 2:8").bounds() == (2, 8)
    assert quorate.RunDir("a", save_every_s=None, summary_every_s=None).save_every_s is None
    of_values = small(workers=3, optimizer=adamw, run_dir=str(tmp_path))
    for number, _ in enumerate(of_values.updates(DATA, steps=2)):
        assert len(of_values.workers) == 3, number
    assert of_values.run_dir == tmp_path
    groups = {"workers": quorate.Workers(1), "optimizer": quorate.Optimize(adamw)}
    of_groups = small(**groups, run_dir=quorate.RunDir(tmp_path / "other", keep=1))
    of_groups.fit(DATA, steps=2)
    mine, theirs = (t.model.state_dict().items() for t in (of_values, of_groups))
    assert digest(mine) == digest(theirs)


WRONG: list[tuple[str, object, Any]] = [
    ("workers", 0, lambda: quorate.Workers(0)),
    ("workers", "3:2", lambda: quorate.Workers("3:2")),
    ("workers", "two", lambda: quorate.Workers("two")),
    ("threads", 0, lambda: quorate.Workers(threads=0)),
    ("Workers.timeout_s", 0, lambda: quorate.Workers(timeout_s=0)),
    ("every_steps", 0, lambda: quorate.Validation(DATA, every_steps=0)),
    ("mode", "less", lambda: EarlyStopping(mode="less")),
    ("patience", 0, lambda: EarlyStopping(patience=0)),
    ("min_delta", -1.0, lambda: EarlyStopping(min_delta=-1.0)),
    ("min_delta", math.inf, lambda: EarlyStopping(min_delta=math.inf)),
    ("factor", 1.0, lambda: ReduceLROnPlateau(factor=1.0)),
    ("every_steps", 0, lambda: LearningRateMonitor(every_steps=0)),
    ("best", "loss", lambda: quorate.Validation(DATA, best="loss")),
]


@pytest.mark.parametrize(("name", "got", "make"), WRONG)
def test_a_group_checks_itself(name: str, got: object, make: Any) -> None:
    with expect_error(SettingError, name=name, got=got):
        make()


# --- the command ----------------------------------------------------------------------------------

TYPED = """
import torch, quorate
x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
trainer = quorate.Trainer(
    lambda: torch.nn.Linear(3, 1), lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1), batch_size=12, shards=3,
    workers=quorate.Workers(2, engine="towers"), run_dir=quorate.RunDir("elsewhere", keep=1),
)
for report in trainer.updates(torch.utils.data.TensorDataset(x), steps=4):
    pass
print(len(trainer.workers), trainer.run_dir)
trainer.fit(torch.utils.data.TensorDataset(x), steps=5)
"""


def test_what_is_typed_beats_what_is_passed(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "script.py", tmp_path / "none"
    script.write_text(TYPED.replace("    pass\n", "    print(len(trainer.workers))\n"))
    typed = ("--workers", "3", "--threads", "2", "--clip-norm", "0.5", "--update", "async")
    typed += ("--summary-every-s", "none", "--run-dir", str(run_dir))
    ended = run(command(script, options=typed))
    assert ended.code == 0, ended.said
    assert "\n3\n" in ended.out
    assert f"0 {run_dir}\n" in ended.out
    assert not (tmp_path / "elsewhere").exists()
    assert not (run_dir / "summaries").exists()
    facts = inspected(run_dir)
    found = {name: facts[name] for name in ("threads", "clip_norm", "update", "workers")}
    assert found == {"threads": 2, "clip_norm": 0.5, "update": "async", "workers": 3}


# --- moved names ----------------------------------------------------------------------------------


def test_a_former_keyword_of_fit_too() -> None:
    with expect_error(SettingError, expected="Validation(every_steps=)"):
        small().fit(DATA, evaluate_every_steps=1)


@pytest.mark.parametrize("name", ["lr", "max_epochs", "accelerator"])
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


# --- questions ------------------------------------------------------------------------------------


def ask_everything(trainer: quorate.Trainer) -> Iterator[Any]:
    fewer = TensorDataset(*(tensor[:2] for tensor in DATA.tensors))
    yield trainer.updates_per_epoch(DATA)
    with suppress(SettingError):  # fewer rows than shards, once their number is known
        trainer.updates_per_epoch(fewer)
    yield trainer.evaluate(DATA)
    yield trainer.evaluate(fewer)
    yield trainer.predict(DATA)
    yield from (trainer.global_step, trainer.averaged_model, trainer.summaries, trainer.workers)
    yield from (trainer.run_dir, trainer.model)
    trainer.stop("nothing runs")
    yield repr(trainer)


def ask_within_a_loop(trainer: quorate.Trainer) -> None:
    trainer.updates_per_epoch(TensorDataset(*(t[:5] for t in DATA.tensors)))
    trainer.evaluate(DATA)
    trainer.predict(DATA)
    assert [worker.number for worker in trainer.workers] == [0, 1, 2]
    assert all(worker.device == "cpu" for worker in trainer.workers)
    assert trainer.averaged_model is not None


def test_questions_leave_the_trainer_as_it_was(tmp_path: Path) -> None:
    def trained(*, asks: bool, path: Path) -> str:
        trainer = small(shards=None, workers=quorate.Workers(3, engine="towers"), run_dir=path)
        for steps in (3, 8):
            if asks:
                assert len([*ask_everything(trainer)]) == 11
                assert trainer.workers == []
            trainer.fit(DATA, steps=steps)
            if asks:
                assert trainer.save().exists()
        for number, _ in enumerate(trainer.updates(DATA, steps=12)):
            if asks and number == 1:
                ask_within_a_loop(trainer)
        if asks:
            assert len([*ask_everything(trainer)]) == 11
        return digest_of(trainer)

    asked = trained(asks=True, path=tmp_path / "asked")
    assert asked == trained(asks=False, path=tmp_path / "silent")


# --- a resume, weights, names ---------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "shards": {"shards": 3},
    "batch_size": {"batch_size": 13},
    "optimizer": {"optimizer": quorate.Optimize(torch.optim.Adafactor, ema_decay=0.9)},
    "update": {"update": "async"},
    "order": {"loading": quorate.Loading(order=lambda epoch: range(56))},
    "last": {"loading": quorate.Loading(last="join")},
    "sampling": {"loading": quorate.Loading(sampling=1.0 + torch.arange(56))},
}
SAID: dict[str, dict[str, Any]] = {
    "threads": {"workers": quorate.Workers(1, threads=2)},
    "clip_norm": {"optimizer": quorate.Optimize(adamw, ema_decay=0.9, clip_norm=1.0)},
    "ema_decay": {"optimizer": quorate.Optimize(adamw, ema_decay=0.8)},
    "is_augmented": {"loading": quorate.Loading(augment=lambda batch, draws: batch)},
    "precision": {"precision": "bf16"},
    "deterministic": {"compute": quorate.Compute(deterministic=True)},
}


def test_what_a_resume_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refuse settings of another run; report settings with other bits."""
    trainer, step = small(run_dir=tmp_path), 2
    trainer.fit(DATA, steps=step)
    model = quorate.load_weights(Small(), tmp_path)
    assert isinstance(model, Small)
    assert digest(model.state_dict().items()) == digest(trainer.model.state_dict().items())
    for name, settings in REFUSED.items():
        with expect_error(CheckpointError) as raised:
            small(run_dir=tmp_path, **settings).fit(DATA, steps=3)
        assert name in str(raised.value), name
    for name, settings in SAID.items():
        capsys.readouterr()
        step += 1
        small(run_dir=tmp_path, **settings).fit(DATA, steps=step)
        said = capsys.readouterr().out
        assert re.search(f"same bits: no, because .*{name} was ", said), (name, said)


def test_names_of_the_package() -> None:
    assert set(quorate.__all__) <= set(dir(quorate))
    assert all(getattr(quorate, name) for name in quorate.__all__)
    with pytest.raises(AttributeError, match="module 'quorate' has no attribute 'Trainor'"):
        _ = quorate.Trainor  # type: ignore[attr-defined]
