"""Worker processes compute the bits of a tower, of models of other libraries too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.references import References
from support.runs import TOWER, command, digests, inspected, last_json, run, run_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc"),
]

# name -> options of a run in processes, and what of them its bits depend on
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "one": (("--workers", "1", "--engine", "processes"), ("--threads", "2"), ()),
    "two": (("--workers", "2"), ("--shards", "5"), ()),
    "three": (("--workers", "3"), (), ("1",)),
}


def test_one_digest_on_any_number_of_processes(tmp_path: Path, references: References) -> None:
    ended = run_all(
        {
            name: command(
                "everything.py",
                *arguments,
                options=(*options, *bits, "--run-dir", str(tmp_path / name)),
            )
            for name, (options, bits, arguments) in VARIANTS.items()
        }
    )
    for name, (_, bits, _) in VARIANTS.items():
        assert ended[name].code == 0, ended[name].said
        expected = references.on_a_tower("everything.py", options=bits).digests
        assert digests(tmp_path / name) == expected, name
        found = inspected(tmp_path / name)
        assert (found["engine"], found["global_step"]) == ("processes", 15)
    assert "on 3 cpu workers (1 thread each)" in ended["three"].out


def test_a_model_in_the_style_of_hugging_face(tmp_path: Path, references: References) -> None:
    options = ("--run-dir", str(tmp_path / "two"), "--workers", "2")
    ended = run(command("hugging_face.py", options=options))
    assert ended.code == 0, ended.said
    expected = references.on_a_tower("hugging_face.py").digests
    assert digests(tmp_path / "two") == expected


def test_a_keras_model(tmp_path: Path) -> None:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed")
    options = {
        name: ("--engine", "processes", "--workers", name, "--run-dir", str(tmp_path / name))
        for name in ("1", "2")
    }
    commands = {name: command("keras_model.py", options=options[name]) for name in options}
    commands["tower"] = command("keras_model.py", options=TOWER)
    ended = run_all(commands, {"KERAS_BACKEND": "torch"})
    for name in options:
        assert ended[name].code == 0, ended[name].said
        # It learns, and so do its running statistics.
        found = last_json(ended[name].out)
        assert found["accuracy"] > 0.85, ended[name].out
        assert found["moved"] > 0.01, ended[name].out
    assert digests(tmp_path / "1") == digests(tmp_path / "2")
    # Its deep copies have other parameters, which would never be trained.
    assert ended["tower"].code == 2
    assert "use engine='processes'" in ended["tower"].err
