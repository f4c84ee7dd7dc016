"""The guard: whether a shard has written what only an update may write.

Around every shard, and so it looks at no value: torch counts how often a tensor was written, and a
tensor that was put elsewhere has another address.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from quorate.replica.notes import Notes
from quorate.replica.torch_internals import versions

_ADDRESS = torch.Tensor.data_ptr


class Guard:
    """What a replica's shards must leave as it is: parameters, trained or not.

    Args:
        model: the replica's.
        expected: names of parameters that its forward pass is known to write.
        notes: for the user.
    """

    def __init__(self, model: torch.nn.Module, expected: Collection[str], notes: Notes) -> None:
        self._model = model
        self._notes = notes
        watched = [(name, p) for name, p in model.named_parameters() if name not in expected]
        self._names = [name for name, _ in watched]
        self._tensors = tuple(parameter for _, parameter in watched)
        self._lie_in: object = None  # the vectors at the time of ``_addresses``
        self._addresses: list[int] = []
        self._versions: list[int] = []

    def begin(self, lie_in: object) -> None:
        """Note how everything is, before a shard.

        Args:
            lie_in: the vectors that the parameters are views of now.
        """
        self._versions = versions(self._tensors)
        if lie_in is not self._lie_in:
            self._addresses, self._lie_in = list(map(_ADDRESS, self._tensors)), lie_in

    def is_kept(self) -> bool:
        """Return whether the shard has left everything as it was; else the user is told."""
        tensors = self._tensors
        now, lie_at = versions(tensors), list(map(_ADDRESS, tensors))
        if now == self._versions and lie_at == self._addresses:
            return True
        before = zip(self._versions, self._addresses, strict=True)
        for name, old, new in zip(self._names, before, zip(now, lie_at, strict=True), strict=True):
            if old != new:
                self._notes.doubt(
                    f"{parameter_text(self._model, name)} is written in forward, and was not when "
                    "a shard was tried: what was written is lost, or seen by other workers; write "
                    "it from the first shard on, or make it a buffer (register_buffer)"
                )
        self._lie_in = None
        return False


def parameter_text(model: torch.nn.Module, name: str) -> str:
    """Return ``encoder.weight (of Linear 'encoder')``, for a sentence."""
    path, _, _ = name.rpartition(".")
    try:
        kind = type(model.get_submodule(path)).__name__
    except AttributeError:  # a name of a way of its own
        return name
    return f"{name} ({kind})"


def written_by_kind(model: torch.nn.Module) -> frozenset[str]:
    """Return names of parameters that modules of torch's write in forward, if only at times."""
    found = set()
    for path, module in model.named_modules():
        bounded = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if bounded and getattr(module, "max_norm", None) is not None:
            found.add(f"{path}.weight" if path else "weight")
    return frozenset(found)
