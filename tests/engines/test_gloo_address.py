"""The address for gloo to listen on leads to all hosts."""

import pytest

from quorate.engines.collective import network
from quorate.engines.collective.network import listening_address, own_address

WAY = {"127.0.1.1": "127.0.0.1", "10.0.0.1": "10.0.0.2", "10.0.0.2": "10.0.0.1"}


@pytest.mark.parametrize(
    ("store", "others", "expected"),
    [
        ("127.0.1.1", ["127.0.0.1", "10.0.0.2"], "10.0.0.1"),  # an address towards another rank
        ("10.0.0.2", ["127.0.0.1"], "10.0.0.1"),  # an address towards the store
        # Ranks of a single machine listen where nobody else can reach the ranks.
        ("127.0.1.1", ["127.0.0.1", "127.0.0.1"], "127.0.0.1"),
        (None, ["127.0.0.1"], "127.0.0.1"),
    ],
)
def test_it_leads_to_the_other_hosts(
    store: str | None, others: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "towards", lambda host, _: WAY.get(host))
    at = None if store is None else (store, 29500)
    own = own_address(at)
    assert listening_address(at, own, [own, *others]) == expected
