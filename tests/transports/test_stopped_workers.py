"""Worker processes that are stopped, and stay so: nobody waits for them, and nothing is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.references import References
from support.runs import LIMIT_S, command, last_json, processes_of, started

from quorate.transports.processes.starter import can_fork

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc"),
]

EVALUATIONS = os.environ.get("QUORATE_TEST_EVALUATIONS", "1000")
STARTING = "; another is starting"


@pytest.mark.parametrize(
    ("moment", "evaluations", "timeout_s", "said"),
    [
        # Every evaluation asks the worker to join, and tells it that it is over.
        ("evaluations", EVALUATIONS, 300, ""),
        ("lost", "1", 8, "took more than worker_timeout_s=8 s to answer"),
        ("joining", "20", 8, f"took more than worker_timeout_s=8 s to start{STARTING}"),
        ("shard", "20", 8, ""),
        ("server", "20", 8, ""),
        ("end", "1", 300, ""),
    ],
)
def test_stopped_workers_hold_up_nothing(
    tmp_path: Path,
    references: References,
    moment: str,
    evaluations: str,
    timeout_s: int,
    said: str,
) -> None:
    if moment == "server" and not can_fork():
        pytest.skip("there is no fork server on this system")
    options = ("--workers", "2", "--worker-timeout-s", str(timeout_s))
    words = command("stopped.py", moment, evaluations, options=options)
    with started(tmp_path, words) as (run_, mark):
        out, _ = run_.communicate(timeout=LIMIT_S)
        assert run_.returncode == 0, out
        assert not processes_of(mark)
    found, expected = last_json(out), references.on_a_tower("stopped.py", "never", "1").json
    assert found["losses"] == expected["losses"], out
    assert found["digest"] == expected["digest"], out
    assert said in out
