"""Gather: a loss over all rows of a batch, such as contrastive losses, which compare all rows.

Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021): the
representations of shards are computed shard by shard; the loss and the gradient with respect to the
representations are computed once, from all rows; each shard is computed again, and the shard's part
of the gradient is propagated back. By the chain rule the sum over shards is the gradient of the
loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quorate.errors import LossError
from quorate.replica.beside.composed import Composed
from quorate.replica.whole_batch.represented import Representations, Tensors, taken_apart
from quorate.settings import function

if TYPE_CHECKING:  # a replica looks into it
    from quorate.replica.replica import Reload, Replica
    from quorate.replica.shard_sum import ShardSum
    from quorate.replica.streams import Stream

Represent = Callable[[torch.nn.Module, Any], Any]
Contrast = Callable[[torch.nn.Module, Any], Any]


class SecondInput(NamedTuple):
    """The input of a shard's second computation."""

    rows: Any  # the batch
    gradients: Tensors  # of the loss, with respect to the representations of the rows


@dataclass(frozen=True)
class Gather(Composed):
    """A loss over all rows of a batch, wherever the shards of the batch are computed.

    For contrastive losses, which compare each row with all others. If you call a ``Gather`` as a
    loss function, the result is the loss over the rows of that call; for a batch of one shard, over
    all rows.

    Args:
        represent: ``represent(model, batch)`` returns a tensor (n, ...) with one representation per
            row of a shard, or a tuple or dict of such tensors. Called twice for each shard, with
            the same random numbers. Integer tensors (labels, row numbers) are gathered too, without
            a gradient.
        contrast: ``contrast(model, representations)`` receives the representations of all rows of
            the batch, shard by shard in the order of the batch, and returns a scalar loss, or a
            dict with the loss and metrics. May use parameters of the model, such as a temperature,
            but must not write buffers. Representations computed in 16 bits arrive as float32.
    """

    represent: Represent
    contrast: Contrast

    def __post_init__(self) -> None:
        function("represent", self.represent, "of a model and a batch", 2)
        function("contrast", self.contrast, "of a model and representations", 2)

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """The functions ``represent`` and ``contrast``, by name."""
        return {"represent": self.represent, "contrast": self.contrast}

    def __call__(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the loss of these rows alone, or what takes gradients back through them."""
        if type(batch) is SecondInput:
            return self._product(model, batch)
        return self.contrast(model, taken_apart(self.represent(model, batch)).widened().returned())

    def represented(
        self,
        replica: Replica,
        batch: Any,
        rows: int,
        stream: Stream,
        seed: int,
        *,
        training: bool,
        reload: Reload | None = None,
    ) -> ShardSum:
        """Compute the representations of one shard; arguments as of ``Replica.gradient``.

        Buffers that it writes count with the gradient, so that they count once.
        """
        found: list[Representations] = []

        def capture(model: torch.nn.Module, batch: Any, *_at: Any) -> torch.Tensor:
            found.append(taken_apart(self.represent(model, batch)).widened().detached())
            return torch.zeros(())

        with replica.watched(lambda _: capture, eager=False):
            shard_sum = replica.evaluation(
                batch, rows, stream, seed, training=training, reload=reload
            )
        shard_sum.represented = found[-1:]  # the last call counts
        return shard_sum

    def _product(self, model: torch.nn.Module, batch: SecondInput) -> torch.Tensor:
        """Return representations times gradients, a product with the gradient of the loss."""
        rows, gradients = batch
        represented = taken_apart(self.represent(model, rows)).tensors
        total = torch.zeros(())
        for name, gradient in gradients.items():
            tensor = represented.get(name)
            if tensor is None or tensor.shape != gradient.shape:
                got = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
                raise LossError(
                    "represent",
                    got=f"{got} for {name!r} when represent was called again with the same rows",
                    expected=f"shape {tuple(gradient.shape)} as before",
                    fix="return the same tensors for the same rows and random numbers",
                )
            if tensor.requires_grad:  # not the output of a teacher
                # In 16 bits, the product of a shard may exceed the range.
                total = total.to(gradient.device) + (tensor.to(gradient.dtype) * gradient).sum()
        return total
