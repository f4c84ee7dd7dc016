"""Keys of files and of ``--json`` outputs: other programs read the keys, so keys never change."""

import json
from pathlib import Path

import pytest
from support.keys import keys_in, keys_of
from support.messages import expect_message
from support.small import DATA, SecondsPass, trainer

import quorate
from quorate.__main__ import main

SCRIPTS = Path(__file__).parents[1] / "scripts"
OF_A_RUN = ("status.json", "metrics.jsonl", "events.jsonl")
PROFILED = ("run", "--devices", "cpu", "--engine", "towers", "--workers", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run, with all possible parts of a checkpoint, and a profile."""
    place = tmp_path_factory.mktemp("keys")
    validation = quorate.Validation(DATA, best="min:loss")
    options = {"summary_every_s": None, "save_every_steps": 2}
    with pytest.MonkeyPatch.context() as patch:
        made = trainer(place / "run", workers=2, **options)
        made.fit(DATA, steps=5, validation=validation, callbacks=[SecondsPass(patch)])
    profile = ("--profile", str(place / "profile.json"), "--profile-s", "0.2")
    with pytest.raises(SystemExit):
        main([*PROFILED, *profile, str(SCRIPTS / "measured.py")])
    return place


@pytest.mark.parametrize("name", OF_A_RUN)
def test_keys_of_a_file(name: str, folder: Path) -> None:
    expect_message(keys_in(folder / "run" / name))


def test_keys_of_a_checkpoint(folder: Path) -> None:
    for path in sorted((folder / "run" / "checkpoints" / "step-000000000005").glob("*.json")):
        expect_message(f"{path.name}\n{keys_in(path)}")


@pytest.mark.parametrize("typed", ["inspect --json RUN", "runs --json RUN", "doctor --json"])
def test_keys_of_an_output(typed: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.replace("RUN", str(folder / "run")).split()) == 0
    expect_message(keys_of(json.loads(capsys.readouterr().out)))


def test_keys_of_a_profile(folder: Path) -> None:
    expect_message(keys_in(folder / "profile.json"))
