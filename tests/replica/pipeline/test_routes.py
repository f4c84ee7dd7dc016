"""Routes of values over stages: who sends what to whom, and the way of gradients back."""

from __future__ import annotations

from torch import fx, nn

from quorate.replica.pipeline.routes import Route, routes
from quorate.replica.pipeline.stage_graph import OUTPUT, StageGraph


def stage(
    index: int,
    takes: tuple[str, ...],
    gives: tuple[str, ...],
    parameters: tuple[str, ...] = (),
    shared: tuple[str, ...] = (),
) -> StageGraph:
    module = fx.GraphModule(nn.Module(), fx.Graph())
    return StageGraph(
        index=index,
        module=module,
        takes=takes,
        gives=gives,
        inputs=("x",),
        parameters=parameters,
        shared=shared,
        buffers=(),
        writes=(),
        modules=(),
    )


def test_a_skip_over_a_stage_and_a_tied_parameter() -> None:
    # a goes to both later stages, b to the last one; w is used by the first and the last.
    found = routes(
        [
            stage(0, ("x",), ("a",), ("w", "first"), ("w",)),
            stage(1, ("a",), ("b",), ("second",)),
            stage(2, ("a", "b", "x"), (OUTPUT,), ("third",), ("w",)),
        ]
    )
    assert found == (
        Route({1: ("a",), 2: ("a",)}, (), {}, (1,), ("w", "first")),
        # The last stage's gradient of a is put into that of the stage between, and goes on.
        Route({2: ("b",)}, (0,), {0: ("a",)}, (2,), ("second",)),
        Route({}, (0, 1), {1: ("a", "b")}, (), ("third",)),
    )


def test_neighbours_hear_from_each_other_without_values() -> None:
    first, second = routes([stage(0, ("x",), ("a",)), stage(1, ("x",), (OUTPUT,))])
    assert (first.forward_to, second.forward_from) == ({1: ()}, (0,))
    assert (second.back_to, first.back_from) == ({0: ()}, (1,))
