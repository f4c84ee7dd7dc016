"""The settings of how rows of a dataset become batches."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from quorate.coordination.epochs import LAST, SHORT
from quorate.settings import AtResume, Settings, a_function, at_least, declare, one_of

if TYPE_CHECKING:
    from quorate.coordination.plan import Order
    from quorate.coordination.sampling import EpochRows
    from quorate.data.draws import Augment
    from quorate.data.source import Collate


def _sampling(name: str, value: object) -> EpochRows:
    # Imported late: NumPy is not loaded for the command's flags.
    sampling: EpochRows = import_module("quorate.coordination.sampling").sampling_of(name, value)
    return sampling


@dataclass(frozen=True, kw_only=True)
class Loading(Settings):
    """Settings for loading rows: collation, augmentation, order, sampling, processes.

    Args:
        collate: a function from a list of samples to a batch. Default: torch's ``default_collate``.
        augment: ``augment(batch, draws)`` returns the batch to train on. Here a batch is one
            collated shard. ``augment`` runs where rows are loaded, in parallel with the
            computation, and not in ``evaluate``. ``draws`` supplies random numbers that depend on
            row and epoch: see ``quorate.Draws``, and ``quorate.data.images`` for image operations.
            Default: no augmentation.
        order: a pure function from the shuffled rows of an epoch, (R,) int64, to the same rows in
            the order of training: to put rows of similar length into one batch, for example.
            Default: the shuffled order.
        sampling: how rows are drawn by weight for an epoch: ``Sampling(weights)``,
            ``Sampling.balanced(labels)``, or one weight per row. Use ``sampling`` if some rows or
            classes are too rare. Default: each row once per epoch.
        last: what to do with the last rows of an epoch, if too few for a batch. "short" (the
            default): train on a smaller batch. "drop": leave the rows out; with ``shuffle``, other
            rows in each epoch. "join": add the rows to the batch before, which then has up to twice
            as many rows; use "join" if a BatchNorm would otherwise see a single row. Evaluations
            always use every row.
        processes: number of processes that load rows, for each worker process, or for all towers
            together. Increase ``processes`` if decoding is slow and workers wait for rows. Default:
            0, load in the worker.
    """

    collate: Collate | None = declare(
        None,
        "function from a list of samples to a batch",
        check=a_function("from a list of samples to a batch"),
    )
    augment: Augment | None = declare(
        None,
        "function of a batch and its random numbers",
        check=a_function("of a batch and what it draws", 2),
        at_resume=AtResume.SAID,
        recorded="is_augmented",
        seen=lambda augment: augment is not None,
    )
    order: Order | None = declare(
        None,
        "function from an epoch's rows to the same rows in another order",
        check=a_function("from an epoch's rows to the same rows"),
        at_resume=AtResume.REFUSED,
        recorded="is_ordered",
        seen=lambda order: order is not None,
    )
    sampling: EpochRows | None = declare(
        None,
        "weights by which the rows of an epoch are drawn",
        check=_sampling,
        at_resume=AtResume.REFUSED,
        recorded="sampling",
        seen=lambda sampling: None if sampling is None else sampling.sha256,
    )
    last: str | None = declare(
        None,
        "what to do with the last rows of an epoch, too few for a batch",
        check=lambda name, value: one_of(name, value, LAST),
        at_resume=AtResume.REFUSED,
        recorded="last",
        seen=lambda last: last or SHORT,
    )
    processes: int = declare(
        0,
        "processes that load rows for each worker process (default: 0)",
        name="loader_workers",
        kind=int,
        check=at_least(0),
    )


class DatasetConfig(NamedTuple):
    """The data to train on or evaluate, and the loading: see ``quorate.data.dataloader``."""

    dataset: Any
    loading: Loading
    shuffle: bool
    loader_line: str | None = None  # description of the parts of a ``DataLoader``; None: no loader
