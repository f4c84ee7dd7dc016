"""Computing: how replicas compute a shard, chosen once for all workers of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from quorate.errors import UserError
from quorate.replica.compute import DEVICE
from quorate.replica.kernels import ONEDNN, TORCH, products
from quorate.replica.precision import FP32, Precision
from quorate.replica.streams import Stream


@dataclass(frozen=True)
class Computing:
    """The settings of the computation; see the arguments of ``Trainer`` with the same names."""

    precision: Precision = FP32
    compile: bool = False
    soft_placement: bool = False
    log_placement: bool = False
    deterministic: bool = False
    kernels: str = TORCH  # or ONEDNN
    random: str = DEVICE  # or HOST
    split: tuple[str, ...] | None = None  # modules before which stages begin, if there are stages

    @property
    def are_products_torchs(self) -> bool:
        """True if ``products`` changes nothing."""
        return self.kernels == TORCH

    def products(self) -> AbstractContextManager[None]:
        """Return a context for a shard, in which the chosen kernels make float32 products."""
        return products.by(self.kernels)

    def draws(
        self, stream: Stream, devices: Sequence[torch.device]
    ) -> AbstractContextManager[None]:
        """Return a context for a shard, in which random numbers are drawn on the chosen side."""
        if self.random == DEVICE:
            return nullcontext()
        return stream.of_devices(frozenset(device.type for device in devices) - {"cpu"})

    @property
    def decided(self) -> dict[str, Any]:
        """The coordinator's decisions, which are sent to all workers, for JSON."""
        return {"compile": self.compile, "kernels": self.kernels, "split": self.split}

    def as_decided(self, decided: Mapping[str, Any]) -> Computing:
        """Return these settings with the coordinator's decisions; see ``decided``.

        Raises:
            UserError: this process cannot compute as decided.
        """
        if decided["kernels"] == ONEDNN and (reason := products.lacking()) is not None:
            raise UserError(
                "kernels",
                got=f"no products by oneDNN ({reason})",
                expected="oneDNN, which the coordinator uses",
                fix="install the same torch on all machines, or pass kernels='torch'",
            )
        split = decided["split"]  # a list, in JSON
        return replace(self, **{**decided, "split": None if split is None else tuple(split)})
