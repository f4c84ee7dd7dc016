"""Ways of computing for the stages of a replica on CPUs: as on CPUs, and as on GPUs."""

import pytest

from quorate.engines.stages.new_replica import REPLICA_CLASSES
from quorate.engines.stages.threaded_replica import ThreadedReplica


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have stages on CPUs be threads."""
    monkeypatch.setitem(REPLICA_CLASSES, "cpu", ThreadedReplica)


@pytest.fixture(params=["processes", "threads"])
def way(request: pytest.FixtureRequest) -> str:
    """Have them be processes, and then threads."""
    if request.param == "threads":
        request.getfixturevalue("in_threads")
    found: str = request.param
    return found
