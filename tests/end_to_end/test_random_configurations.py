"""Random configurations follow from a seed, cover all tables, and are read from their line."""

from itertools import islice

import pytest
from support.trainings.configuration import EVENTS, Configuration, draw_configurations, parse
from support.trainings.datasets import DATASETS
from support.trainings.engines import ENGINES, MORTAL
from support.trainings.models import DRAWN
from support.trainings.optimizers import OPTIMIZERS, UPDATE_OPTIONS
from support.trainings.runner import Outcome, differences


@pytest.mark.parametrize("seed", range(2))
def test_forty_configurations_have_every_value_of_every_table(seed: int) -> None:
    drawn = [*islice(draw_configurations(seed), 40)]
    tables = {
        "model": DRAWN,
        "optimizer": OPTIMIZERS,
        "data": DATASETS,
        "engine": ENGINES,
        "event": EVENTS,
    }
    for field, table in tables.items():
        assert {getattr(configuration, field) for configuration in drawn} == {*table}, field
    assert {option for c in drawn for option in c.options} >= {*UPDATE_OPTIONS}
    assert all(c.engine in MORTAL for c in drawn if c.event == "kill-worker")


def test_a_line_is_read_again_and_a_wrong_word_is_named() -> None:
    for configuration in islice(draw_configurations(3), 200):
        assert parse(str(configuration)) == configuration
    assert parse("") == Configuration()
    with pytest.raises(ValueError, match="model: got 'mlpp', expected one of linear, mlp"):
        parse("model=mlpp")


def test_outcomes_differ_in_codes_digests_and_metrics_and_not_in_wording() -> None:
    facts = {"digest": "a", "global_step": 8}
    one = Outcome([0], facts, [{"global_step": 1, "loss": 0.5}], "saved")
    assert differences(one, one._replace(said="kept")) == []
    for other, word in (
        (one._replace(codes=[1]), "exit codes: [0] before, [1] now"),
        (one._replace(facts={**facts, "digest": "b"}), "digest: a before, b now"),
        (one._replace(metrics=[]), "metrics: 1 lines before, 0 now"),
        (one._replace(metrics=[{"global_step": 1, "loss": 0.25}]), "metrics, line 1, loss: 0.5"),
    ):
        (line,) = differences(one, other)
        assert line.startswith(word)
