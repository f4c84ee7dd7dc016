"""User code between updates is looked for where it may have run, and not where it cannot have."""

from __future__ import annotations

from quorate.training.callbacks import Callback, defines
from quorate.training.collective.visits import Visits


def test_who_announces_nothing_may_run_at_any_time() -> None:
    visits, taken = Visits(), list[int]()
    assert visits.has_come, "nobody knows what was done before the first update"
    visits.updated(lambda: taken.append(1))
    assert visits.has_come
    assert taken == [1]


def test_values_are_taken_before_the_first_code_that_runs() -> None:
    visits, taken = Visits(), list[int]()
    with visits.announced():
        for n in range(3):
            visits.updated(lambda n=n: taken.append(n))
            assert not visits.has_come
            if n == 1:
                visits.announce()
                visits.announce()
                assert visits.has_come
    assert taken == [1]
    visits.updated(lambda: taken.append(9))
    assert taken == [1, 9], "the loop that announces is over"


def test_a_callback_visits_where_it_has_a_method_of_its_own() -> None:
    class Saves(Callback):
        def saved(self, global_step: int, path: object) -> None:
            """Hear of it."""

    class Odd:
        def updated(self, report: object) -> None:
            """Of a class of its own: it is called as well."""

    callback, given = Saves(), Callback()
    given.stopped = lambda reason: None  # type: ignore[method-assign]
    methods = ["started", "updated", "evaluated", "saved", "stopped"]
    assert [name for name in methods if defines(callback, name)] == ["saved"]
    assert [name for name in methods if defines(given, name)] == ["stopped"]
    assert defines(Odd(), "updated")  # type: ignore[arg-type]
