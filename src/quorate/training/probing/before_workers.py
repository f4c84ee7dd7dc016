"""The look between the probe and the first worker: needed metrics, and the model's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quorate.data.source import Source
from quorate.machine.memory_fraction import free_cache
from quorate.replica.model import unchanged
from quorate.replica.witness.forward_graph import ForwardGraph, Node, module_tree
from quorate.training.callbacks import Callback
from quorate.training.config import DatasetConfig
from quorate.training.ending import needed_metrics
from quorate.training.probing.probe import on_shard
from quorate.training.state import State
from quorate.training.validation import Validation
from quorate.training.worker_group import WorkerGroup


class BeforeWorkers:
    """A look at a state before there are workers, if there are updates to make.

    Args:
        workers: the workers of the training.
        metrics: raises an error if a needed metric is missing: see ``needed_metrics``.
    """

    def __init__(self, workers: WorkerGroup, metrics: Callable[[State], None]) -> None:
        self._workers = workers
        self._metrics = metrics
        run_dir = workers.config.run_dir
        self._wants_graph = run_dir.path is not None and run_dir.summary_every_s is not None
        self._graph: list[Node] | None = None

    def __call__(self, state: State, source: Source) -> None:
        """Check metrics, and compute the graph; raises the errors of ``metrics``."""
        self._metrics(state)
        if self._wants_graph:
            self._graph = graph_of(self._workers, state, source)

    def graph(self) -> list[Node] | None:
        """Return the graph of the model's forward pass; None without summaries."""
        return self._graph


def looking(
    workers: WorkerGroup,
    validation: Validation | None,
    rows: DatasetConfig | None,
    callbacks: Sequence[Callback],
) -> BeforeWorkers:
    """Return the look before workers; arguments and errors as for ``needed_metrics.looking``."""
    return BeforeWorkers(workers, needed_metrics.looking(workers, validation, rows, callbacks))


def graph_of(workers: WorkerGroup, state: State, source: Source) -> list[Node]:
    """Compute shard 0 of step 0 once more, for the graph of its forward pass. Raises nothing.

    The result is thrown away. Afterwards the model, shared containers of its code and all
    generators are as before. The graph is not computed in the probe, where a shard must be computed
    exactly as in training.
    """
    shared = workers.replicas.contents()
    try:
        with unchanged(state.model):
            replica = workers.probe_replica(state)
            replica.witness.is_silent = True
            replica.pull(state.parameters, version=object())
            graph, batch = ForwardGraph(replica.model), source.load((0, 0))
            with on_shard(replica, batch, source.plan) as shard, replica.watched(graph.watch):
                replica.evaluation(batch.data, shard.rows, shard.stream, shard.seed, training=True)
        return graph.nodes() or module_tree(state.model)
    except Exception:  # user code that cannot be watched
        return module_tree(state.model)
    finally:
        shared.restore()
        if workers.has_processes:
            free_cache(workers.devices)
