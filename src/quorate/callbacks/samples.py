"""Images and texts that the model generates, shown next to the curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from quorate.errors import SettingError
from quorate.training.callbacks import Callback, Run


class Taker(Protocol):
    """A logger that accepts samples: ``WandB``, ``MLflow``."""

    def take_samples(self, global_step: int, samples: Mapping[str, Any]) -> None:
        """Log images, (C, H, W) or (N, C, H, W), and texts."""


class Samples(Callback):
    """Show images and texts of the model after each evaluation of the validation set.

    Args:
        make: ``make(trainer)`` returns a dict of samples by name: an image as (C, H, W), float from
            0 to 1 or uint8; several images as (N, C, H, W); or a text.
        to: callbacks that also log the samples: ``WandB``, ``MLflow``. TensorBoard shows the
            samples whenever the run has summaries.

    Raises:
        SettingError: a value is not valid.
    """

    def __init__(
        self, make: Callable[[Run], Mapping[str, torch.Tensor | str]], *, to: Sequence[Taker] = ()
    ) -> None:
        for taker in to:
            if not hasattr(taker, "take_samples"):
                expected, fix = "bridges: WandB, MLflow", "leave it out"
                raise SettingError("to", type(taker).__name__, expected, fix)
        self._make, self._to = make, to
        self._trainer: Run | None = None

    def started(self, trainer: Run) -> None:
        """Keep the trainer."""
        self._trainer = trainer

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:  # noqa: ARG002
        """Make samples, and show them."""
        assert self._trainer is not None
        samples = {name: _checked(name, each) for name, each in self._make(self._trainer).items()}
        writer = self._trainer.summaries
        for name, sample in samples.items() if writer is not None else ():
            if isinstance(sample, str):
                writer.add_text(name, sample, global_step)
            else:
                add = writer.add_image if sample.ndim == 3 else writer.add_images
                add(name, sample, global_step)
        for taker in self._to:
            taker.take_samples(global_step, samples)


def as_pixels(image: torch.Tensor) -> Any:
    """Return an image, (C, H, W), as a NumPy array: (H, W, C) uint8, or (H, W) for one channel."""
    if image.is_floating_point():
        image = (image.clamp(0, 1) * 255).round().to(torch.uint8)
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


def _checked(name: str, sample: Any) -> Any:
    if isinstance(sample, str):
        return sample
    if not isinstance(sample, torch.Tensor) or sample.ndim not in (3, 4):
        got = tuple(sample.shape) if isinstance(sample, torch.Tensor) else type(sample).__name__
        expected = "an image, (C, H, W) or (N, C, H, W), or a text"
        raise SettingError(f"sample {name!r}", got, expected, "return one of these")
    return sample.detach().cpu()
