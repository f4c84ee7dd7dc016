"""The guard: checks whether a shard has written parameters reserved for updates.

The guard runs around every shard, and so reads no values unless needed: torch counts the writes to
a tensor, and a moved tensor has another address. An in-place write by ``.data`` changes neither: if
a model's code names ``.data``, sums over values are compared. Parameters shared with the
coordinator, which may write while an unneeded shard is computed, are compared by the coordinator
between updates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from operator import methodcaller

import torch

from quorate.errors import UserError
from quorate.machine.text import abridged_names
from quorate.replica.notes import Notes
from quorate.replica.torch_internals import parameters_of, versions

_ADDRESS = torch.Tensor.data_ptr
_VALUES = methodcaller("values")
ALL_OF, THEN_EVERY = 64, 16  # shards checked for other objects: all at first, then every so many
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ParameterGuard:
    """The parameters to be left unchanged by a replica's shards, trained or not.

    Args:
        model: the replica's model.
        unwatched: names of parameters with known writes by the forward pass or further code.
        notes: messages for the user.
        by_value: ``id`` of parameters whose values are compared too.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        unwatched: Collection[str],
        notes: Notes,
        *,
        by_value: Collection[int] = (),
    ) -> None:
        self._model = model
        self._notes = notes
        watched = [(name, p) for name, p in model.named_parameters() if name not in unwatched]
        self._names = [name for name, _ in watched]
        self._tensors = tuple(parameter for _, parameter in watched)
        modules = [
            (path, parameters_of(module))
            for path, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        self._paths, self._tables = [path for path, _ in modules], [own for _, own in modules]
        self._held = [dict(own) for own in self._tables]  # the objects at construction
        self._ids, self._shards = self._ids_now(), 0
        self._lie_in: object = None  # the vectors at the time of ``_addresses``
        self._addresses: list[int] = []
        self._versions: list[int] = []
        numbered = enumerate(self._tensors)
        self._by_value = [number for number, p in numbered if id(p) in by_value]
        self._sums: list[torch.Tensor] = []
        self._told: set[int] = set()  # numbers of reported tensors

    def begin(self, lie_in: object) -> None:
        """Note the present state, before a shard.

        Args:
            lie_in: the vectors that the parameters are views of now.
        """
        self._versions = versions(self._tensors)
        if lie_in is not self._lie_in:
            self._addresses, self._lie_in = list(map(_ADDRESS, self._tensors)), lie_in
        if self._by_value:
            self._sums = [bit_sum(self._tensors[number]) for number in self._by_value]

    def require_same_objects(self) -> None:
        """Refuse a forward pass that replaces a parameter.

        Raises:
            UserError: a parameter was replaced. In a plain loop the optimizer would go on with the
                old parameter, and the new parameter would not be trained.
        """
        self._shards += 1
        if self._shards > ALL_OF and self._shards % THEN_EVERY:
            return  # a replaced parameter stays: a later check finds it too
        if self._ids_now() == self._ids:
            return
        for path, table, held in zip(self._paths, self._tables, self._held, strict=True):
            for name in {**held, **table}:
                if table.get(name) is not held.get(name):
                    label = f"{path}.{name}".lstrip(".")
                    raise UserError(
                        f"parameter {label!r}",
                        got=f"{'another' if name in held else 'a new'} parameter after a forward "
                        "pass, which no "
                        "optimizer has",
                        expected="the parameters of the model before training",
                        fix="make parameters before training and write into them: "
                        "p.data.copy_(values); tie "
                        "parameters before training, not in forward",
                    )

    def _ids_now(self) -> tuple[int, ...]:
        # Without a line of Python per parameter.
        return tuple(map(id, chain.from_iterable(map(_VALUES, self._tables))))

    def is_kept(self) -> bool:
        """Return whether the shard has changed nothing; otherwise report the changes."""
        tensors = self._tensors
        now, lie_at = versions(tensors), list(map(_ADDRESS, tensors))
        changed = set[int]()
        if self._by_value:
            sums = zip(self._by_value, self._sums, strict=True)
            changed = {number for number, old in sums if not old.equal(bit_sum(tensors[number]))}
        if now == self._versions and lie_at == self._addresses and not changed:
            return True
        before = zip(self._versions, self._addresses, strict=True)
        pairs = zip(before, zip(now, lie_at, strict=True), strict=True)
        changed |= {number for number, (old, new) in enumerate(pairs) if old != new}
        tell_late(self._notes, self._model, [self._names[n] for n in sorted(changed - self._told)])
        self._told |= changed
        self._lie_in = None
        return False


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's elements, each as the integer with its bits."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        return torch.zeros(())
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.reshape(-1).view(_INTEGERS[values.element_size()]).sum()


def places(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return for each tensor the number of counted writes, and its address."""
    counts = versions(tensors) or [0] * len(tensors)
    return list(zip(counts, map(_ADDRESS, tensors), strict=True))


def tell_late(notes: Notes, model: torch.nn.Module, names: Sequence[str]) -> None:
    """Report, as a doubt, parameters written by forward that were not written at first."""
    if texts := [parameter_text(model, name) for name in names]:
        notes.doubt(
            f"forward writes {abridged_names(texts)} now and did not in the first shard: the "
            "written values are lost, or other workers see the values; write from the first shard "
            "on, or use a buffer (register_buffer)"
        )


def parameter_text(model: torch.nn.Module, name: str) -> str:
    """Return ``encoder.weight (of Linear 'encoder')``, for a sentence."""
    path, _, _ = name.rpartition(".")
    try:
        kind = type(model.get_submodule(path)).__name__
    except AttributeError:  # a name by a naming scheme of its own
        return name
    return f"{name} ({kind})"


def written_by_kind(model: torch.nn.Module) -> frozenset[str]:
    """Return names of parameters that torch's modules write in forward, if only at times."""
    found = set()
    for path, module in model.named_modules():
        bounded = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if bounded and getattr(module, "max_norm", None) is not None:
            found.add(f"{path}.weight" if path else "weight")
    return frozenset(found)
