"""Testing: workers in memory, and the contract of transports.

For tests of callbacks, loops and scripts: a trainer's workers do what a script says, one move at a
time, on a clock that nobody waits for. The gradients are real, with the same bits as anywhere.

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

For authors of transports: ``check_transport(transport, job)`` tries the contract clause by clause;
``checking_transport()`` does so with what a trainer uses, whatever that is::

    with checking_transport() as clauses:
        trainer.fit(data, steps=2)
    print(*clauses, sep="; ")

Nothing in quorate imports this.
"""

from quorate.testing.around_trainer import checking_transport, in_memory
from quorate.testing.contract import ContractError, check_transport
from quorate.testing.moves import (
    Fails,
    Finishes,
    Hangs,
    Joins,
    Leaves,
    LeavesOff,
    Move,
    ScriptError,
)
from quorate.testing.transport import InMemory

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
    "check_transport",
    "checking_transport",
    "in_memory",
]
