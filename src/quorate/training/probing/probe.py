"""The probe: a model computes a shard before any worker is started.

A mistake in the model or the loss raises in the caller's own thread. The probe also finds the
model's draws, retained state and writes, and tries ``channels_last``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch

from quorate.coordination.keys import key
from quorate.coordination.plan import Plan, Rows, abridged
from quorate.data.source import Batch, Source
from quorate.engines.remote_error import exited
from quorate.engines.selection import TOWERS
from quorate.errors import CompileError, CopyError
from quorate.machine import out_of_memory
from quorate.machine.devices import current
from quorate.replica.channels_last import convolves, set_format
from quorate.replica.loss import Loss
from quorate.replica.model import unchanged
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream
from quorate.replica.witness.again import (
    Computed,
    ShardArgs,
    doubts,
    gradients_of,
    result_of,
    texts_of,
)
from quorate.replica.witness.history import Pair, forget_cached, history_doubts, moved
from quorate.replica.witness.kept import changed, kept
from quorate.replica.witness.trial import NOTHING, written_in, written_text
from quorate.replica.witness.yields import ShardYield, yield_of
from quorate.training.state import State
from quorate.training.worker_group import WorkerGroup

ALONE = "Expected more than 1 value per channel when training"  # torch's, by batch normalisation


def probed(
    workers: WorkerGroup, source: Source, *, training: bool, say: Callable[[str], None]
) -> State:
    """Make a state and compute one shard with it; the result of the shard is thrown away.

    Values written by forward, and gradients by rows, decide how a state is laid out; they are found
    by trials. Findings about the code are notes of the workers' replicas.

    Raises:
        UserError: the model or the loss cannot be trained.
        Exception: an error of the user's code, with a note that names the rows.
    """
    model, loss, replicas = workers.model, workers.config.loss, workers.replicas
    plan, make_replica = source.plan, workers.probe_replica
    batch = source.load((0, 0))
    other = partial(source.load, (0, 1) if plan.shards_of(0) > 1 else (1, 0))
    if training and any(isinstance(m, torch.nn.SyncBatchNorm) for m in model.modules()):
        say("SyncBatchNorm normalises over each shard separately, as BatchNorm does in quorate")
    at_first, kept_at_first = replicas.contents(), kept(model, loss)
    if convolves(model):
        _set_best_format(workers, batch, plan, training=training, say=say)
    known, computed = NOTHING, list[Computed]()
    used: Pair | None = None
    while True:
        state = workers.new_state(
            mutable_frozen=known.frozen, written=known.trained, by_rows=known.by_rows
        )
        with unchanged(model):
            replica = make_replica(state)
            with (
                _tried(replica, batch),
                on_shard(replica, batch, plan) as shard,
                replicas.watching(towers=workers.engine == TOWERS),
            ):
                compute = partial(_computed, replica, shard, loss, training=training)
                found, first = written_in(replica, compute, known)
                computed.append(first)
                if training:
                    by_rows = state.phases.kept_by_rows(first.gradients)
                    found = found._replace(by_rows=by_rows)
                if training and known.covers(found):  # a second time, on the same replica
                    last = compute()
                    named = doubts(replica, computed[0], last, shard)
                    for doubt in named:
                        replicas.notes.doubt(doubt)
                    if not named and changed(kept_at_first, last.after):
                        with suppress(Exception):  # user errors; training shows them
                            used = _pair(replica, state, shard, batch.rows, other, plan, loss)
        if known.covers(found):
            break
        known = known.union(found)  # the state depends on writes: begin again from the start
    if used is not None:
        with unchanged(model), at_first.put_back(), suppress(Exception):
            forget_cached(model)
            replica = make_replica(state)
            with on_shard(replica, batch, plan) as shard:
                new = _pair(replica, state, shard, batch.rows, other, plan, loss, in_order=False)
            for doubt in history_doubts(replica.model, kept_at_first, used, new):
                replicas.notes.doubt(doubt)
        forget_cached(model)  # values cached from other parameters
    for line in (*written_text(model, known.trained), *texts_of(computed[-1].gradients)):
        say(line)
    return state


def _set_best_format(
    workers: WorkerGroup, batch: Batch, plan: Plan, *, training: bool, say: Callable[[str], None]
) -> None:
    """Store the model's tensors as channels_last, if the results agree."""
    model, yields = workers.model, list[ShardYield]()
    for memory_format in (torch.contiguous_format, torch.channels_last):
        set_format(model, memory_format)
        state = workers.new_state()
        with unchanged(model):
            replica = workers.probe_replica(state)
            # Not compiled: neither trial is worth compiling.
            as_it_is = replica.watched(lambda loss: loss)
            try:
                with _tried(replica, batch), on_shard(replica, batch, plan) as shard:
                    compute = partial(yield_of, replica, shard, training=training)
                    towers = workers.engine == TOWERS
                    with workers.replicas.watching(towers=towers), as_it_is:
                        yields.append(written_in(replica, compute, NOTHING)[1])
            except (CopyError, CompileError):
                raise
            except Exception:  # the user's code
                if not yields:
                    raise
                say("channels_last is off: the model raises an error with channels_last")
                break
    else:
        if yields[0].agrees(yields[1]):
            return
        say("channels_last is off: the model has a different loss or gradient with channels_last")
    set_format(model, torch.contiguous_format)


@contextmanager
def on_shard(replica: Replica, batch: Batch, plan: Plan) -> Iterator[ShardArgs]:
    """Prepare the computation of a shard inside the block."""
    replica.loss_call.place(plan, 0, batch.rows, of_phase=False)
    with current(replica.device), Stream() as stream:
        yield ShardArgs(batch.data, len(batch.rows), stream, key("probe", plan.seed))


@contextmanager
def _tried(replica: Replica, batch: Batch) -> Iterator[None]:
    """Add a note with the rows of the trial to an exception of user code."""
    try:
        yield
    except SystemExit as error:
        raise exited(error, "shard 0 of step 0, which is tried first") from error
    except (CopyError, CompileError):
        raise
    except Exception as error:
        rows = abridged(batch.rows)
        error.add_note(f"quorate: while trying shard 0 of step 0, rows {rows}")
        if len(batch.rows) == 1 and ALONE in str(error):
            error.add_note(
                "quorate: a shard has one row: pass a larger batch_size, or fewer shards"
            )
        if getattr(replica.model, "automatic_optimization", True) is False:  # Lightning's name
            error.add_note(
                f"quorate: {type(replica.model).__name__} has automatic_optimization = False, and "
                "quorate makes the updates itself: return a loss, or one for each optimizer: "
                "docs/several-models.md"
            )
        if (text := out_of_memory.note(error, replica.device)) is not None:
            error.add_note(text)
        raise


def _pair(
    replica: Replica,
    state: State,
    shard: ShardArgs,
    rows: Rows,
    other: Callable[[], Batch],
    plan: Plan,
    loss: Loss,
    *,
    in_order: bool = True,
) -> Pair:
    """Compute a shard from the present parameters, and another shard from moved parameters."""
    batch = other()
    later = shard._replace(data=batch.data, rows=len(batch.rows), seed=shard.seed ^ 1)
    found: list[Computed] = []
    works = [(state.parameters, shard, rows), (moved(state.parameters), later, batch.rows)]
    for parameters, each, its_rows in works if in_order else works[::-1]:
        replica.loss_call.place(plan, 0, its_rows, of_phase=False)
        replica.pull(parameters, version=object())
        with replica.watched(lambda loss: loss):  # neither is worth compiling
            found.append(_computed(replica, each, loss))
    return Pair(*(found if in_order else found[::-1]))


def _computed(replica: Replica, shard: ShardArgs, loss: Loss, *, training: bool = True) -> Computed:
    work = replica.gradient if training else replica.evaluation
    before = kept(replica.model, loss)
    shard_sum = work(shard.data, shard.rows, shard.stream, shard.seed)
    # Buffers are left out: unknown writes are not carried yet; the effect is in the gradient.
    result = result_of(shard_sum, with_buffers=False)
    gradients = gradients_of(replica, shard_sum)
    replica.recycle(shard_sum)
    return Computed(result, before, kept(replica.model, loss), gradients)
