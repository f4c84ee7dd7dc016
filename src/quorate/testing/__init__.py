"""Test helpers: workers in memory with scripted failures, and the contract test of engines.

``in_memory`` is for tests of callbacks, training loops and scripts. The workers of a trainer follow
a script, one move at a time, on a virtual clock, so tests do not wait. The gradients are real, with
the same bits as with any other workers.

::

    import quorate
    from quorate.testing import Finishes, Joins, Leaves, in_memory

    def test_the_callback_sees_every_update_though_a_worker_is_lost():
        seen = MyCallback()
        trainer = quorate.Trainer(
            Net, loss, optimizer=adam, batch_size=32, shards=4, devices="cpu",
            workers=quorate.Workers(2, engine="towers"),
        )
        with in_memory([Finishes(1), Leaves(1), Finishes(0), Joins(1)]) as happened:
            trainer.fit(data, steps=3, callbacks=[seen])
        assert seen.steps == [1, 2, 3]
        assert any(isinstance(event, Left) for event in happened)

For authors of engines, ``check_engine(transport, job)`` tests the contract clause by clause.
``checking_transport()`` tests the engine that a trainer uses::

    with checking_transport() as clauses:
        trainer.fit(data, steps=2)
    print(*clauses, sep="; ")

No other part of quorate imports this package.
"""

from quorate.testing.contract import (
    ContractError,
    check_engine,
    check_transport,
    checking_transport,
)
from quorate.testing.workers_in_memory import (
    Fails,
    Finishes,
    Hangs,
    InMemory,
    Joins,
    Leaves,
    LeavesOff,
    Move,
    ScriptError,
    in_memory,
)

__all__ = [
    "ContractError",
    "Fails",
    "Finishes",
    "Hangs",
    "InMemory",
    "Joins",
    "Leaves",
    "LeavesOff",
    "Move",
    "ScriptError",
    "check_engine",
    "check_transport",
    "checking_transport",
    "in_memory",
]
