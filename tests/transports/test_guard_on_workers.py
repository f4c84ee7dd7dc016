"""The guard, a new beginning, and services on worker processes: as on towers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.references import References
from support.runs import command, digests, inspected, last_json, run_all

pytestmark = pytest.mark.slow

RULES = ("sync", "quorum:3", "bounded:1")
WORKERS = ("--engine", "processes", "--workers", "2")


def test_a_gradient_that_is_not_finite_ends_the_run_under_any_rule(tmp_path: Path) -> None:
    ended = run_all(
        {
            rule: command(
                "not_finite.py", rule, "stop", "12",
                options=(*WORKERS, "--run-dir", str(tmp_path / rule)),
            )
            for rule in RULES
        }
    )  # fmt: skip
    for rule, run in ended.items():
        assert run.code == 1, run.said
        said = run.err.splitlines()[-1]
        assert "the gradient of weight, bias is not finite in step" in said, run.said
        # Row 21; a quorum may have dropped it, and meet row 30.
        if rule != "quorum:3":
            where = "step 2: shard 2" if rule == "sync" else "step 10: shard 0"
            assert f"{where} (worker " in said
            assert "), rows [20, 21]; update " in said
            made = inspected(tmp_path / rule)["global_step"]
            assert made == 2 or (rule != "sync" and made <= 11)
        (saved,) = sorted((tmp_path / rule / "checkpoints").glob("step-*"))[-1:]
        assert all(
            bool(v.isfinite().all()) for v in load_file(saved / "model.safetensors").values()
        )


def test_skipped_updates_leave_the_state_on_workers_too(
    tmp_path: Path, references: References
) -> None:
    ended = run_all(
        {
            rule: command(
                "not_finite.py", rule, "skip", "6" if rule == "sync" else "24",
                options=(*WORKERS, "--run-dir", str(tmp_path / rule)),
            )
            for rule in ("sync", "bounded:1")
        }
    )  # fmt: skip
    for rule, run in ended.items():
        assert run.code == 0, run.said
        assert last_json(run.out)["finite"], rule
        lines = (tmp_path / rule / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["not_finite"] == 2, rule
    expected = references.on_a_tower("not_finite.py", "sync", "skip", "6").json
    assert expected == last_json(ended["sync"].out)


def test_a_run_begins_anew_and_from_the_weights_of_another(tmp_path: Path) -> None:
    """Also with more workers than shards, and services beside them."""

    def words(name: str, *options: str) -> list[str]:
        more = ("--engine", "processes", "--workers", "3", "--shards", "2", *options)
        options = (*more, "--run-dir", str(tmp_path / name))
        return command("hundred.py", "8", "momentum", options=options)

    first = run_all({"a": words("a")})["a"]
    assert first.code == 0, first.said
    whole = digests(tmp_path / "a")
    other = run_all({"b": words("b", "--init-from", str(tmp_path / "a"))})["b"]
    assert other.code == 0, other.said
    again = run_all({"a": words("a", "--fresh")})["a"]
    assert again.code == 0, again.said
    assert "resumed" not in again.out
    assert digests(tmp_path / "a") == whole
    assert digests(tmp_path / "a" / "aside-1") == whole
    assert digests(tmp_path / "b") != whole  # it began where the other ended
    assert inspected(tmp_path / "b")["global_step"] == 8
    assert list((tmp_path / "b" / "summaries").iterdir())
