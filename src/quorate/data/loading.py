"""Loading: how rows of a dataset become batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from quorate.coordination.epochs import LAST, SHORT
from quorate.settings import AtResume, Settings, a_function, about, at_least, one_of

if TYPE_CHECKING:
    from quorate.coordination.plan import Order
    from quorate.coordination.sampling import EpochRows
    from quorate.data.draws import Augment
    from quorate.data.source import Collate


def _sampling(name: str, value: object) -> EpochRows:
    # It takes NumPy, which is not loaded for the command's flags.
    sampling: EpochRows = import_module("quorate.coordination.sampling").sampling_of(name, value)
    return sampling


@dataclass(frozen=True, kw_only=True)
class Loading(Settings):
    """How rows are loaded.

    Args:
        collate: from a list of samples to a batch. Default: torch's.
        augment: ``augment(batch, draws)`` returns what is trained on in the place of a collated
            batch, here a shard of one; not in ``evaluate``. It runs where rows are loaded, beside
            computing. ``draws`` gives random numbers that belong to row and epoch: see
            ``quorate.Draws``, and ``quorate.data.images`` for what to do with them.
        order: from the rows of an epoch as they are shuffled, (R,) int64, to the order that ``fit``
            takes them in, each once: rows of like length into one batch, say. A pure function.
        sampling: which rows an epoch has, drawn by weights: ``Sampling(weights)``,
            ``Sampling.balanced(labels)``, or the weights alone, a number per row. Choose it where
            some rows or classes are too rare.
        last: what becomes of an epoch's rows that fill no batch. "short", which is the default:
            they are a batch of their own. "drop": they are in none; with ``shuffle`` it is others
            in each epoch. "join": they are in the batch before, which then has up to twice as many
            rows: a BatchNorm that would see one row, say. An evaluation has every row.
        processes: how many processes load rows, of each worker process or for all towers together.
            Turn it up if decoding is slow and workers wait for rows.
    """

    collate: Collate | None = field(
        default=None,
        metadata=about(
            "function from a list of samples to a batch",
            check=a_function("from a list of samples to a batch"),
        ),
    )
    augment: Augment | None = field(
        default=None,
        metadata=about(
            "function of a batch and its random numbers",
            check=a_function("of a batch and what it draws", 2),
            at_resume=AtResume.SAID,
            recorded="is_augmented",
            seen=lambda augment: augment is not None,
        ),
    )
    order: Order | None = field(
        default=None,
        metadata=about(
            "function from an epoch's rows to the same rows in another order",
            check=a_function("from an epoch's rows to the same rows"),
            at_resume=AtResume.REFUSED,
            recorded="is_ordered",
            seen=lambda order: order is not None,
        ),
    )
    sampling: EpochRows | None = field(
        default=None,
        metadata=about(
            "weights by which the rows of an epoch are drawn",
            check=_sampling,
            at_resume=AtResume.REFUSED,
            recorded="sampling",
            seen=lambda sampling: None if sampling is None else sampling.sha256,
        ),
    )
    last: str | None = field(
        default=None,
        metadata=about(
            "what to do with the last rows of an epoch, too few for a batch",
            check=lambda name, value: one_of(name, value, LAST),
            at_resume=AtResume.REFUSED,
            recorded="last",
            seen=lambda last: last or SHORT,
        ),
    )
    processes: int = field(
        default=0,
        metadata=about(
            "processes that load rows for each worker process (default: 0)",
            name="loader_workers",
            kind=int,
            check=at_least(0),
        ),
    )


class Taken(NamedTuple):
    """What is trained on or evaluated, and how it is loaded: see ``quorate.data.dataloader``."""

    dataset: Any
    loading: Loading
    shuffle: bool
    line: str | None = None  # what was taken of a ``DataLoader``; None: it was none
