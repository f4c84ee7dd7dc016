"""Operations on batches of images, (B, C, H, W), for augmentation.

The operations draw no random numbers. Row i of an argument, as returned by ``Draws``, decides what
happens to image i, so you can apply the same operation to an image and to its mask::

    places = draws.uniform(2)
    image, mask = crop(image, places, (64, 64)), crop(mask, places, (64, 64))

The result for an image has the same bits in any batch and at any position of the batch. The
operations only copy, or work element by element with correct rounding; sums are added in an order
that depends only on the size of an image.

Legend: B images, C channels, H rows of pixels, W columns.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from quorate.errors import SettingError


def crop(
    images: torch.Tensor, places: torch.Tensor, size: tuple[int, int], *, padding: int = 0
) -> torch.Tensor:
    """Crop a window from each image.

    Args:
        images: (B, C, H, W), any dtype.
        places: (B, 2), position of each window, from 0 (top, left) to 1 (bottom, right).
            ``draws.uniform(2)`` makes all positions equally likely.
        size: (h, w) of the windows.
        padding: number of zero pixels to add on each side of the images before the crop. Default:
            0.

    Returns:
        (B, C, h, w).

    Raises:
        SettingError: the window is larger than the image.
    """
    if padding:
        images = F.pad(images, (padding,) * 4)
    tops, lefts = (
        _first(place, images.shape[dim], _fitting(images, size, dim))
        for dim, place in zip((2, 3), places.unbind(1), strict=True)
    )
    rows = (tops[:, None] + torch.arange(size[0])) * images.shape[3]  # (B, h)
    columns = lefts[:, None] + torch.arange(size[1])  # (B, w)
    sources = rows[:, :, None] + columns[:, None, :]
    return _gathered(images, sources.flatten(1)).view(*images.shape[:2], *size)


def center_crop(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Crop the center of each image, (B, C, h, w). Returns a view.

    Raises:
        SettingError: ``size`` is larger than the image.
    """
    lengths = {dim: _fitting(images, size, dim) for dim in (2, 3)}
    for dim, length in lengths.items():
        images = images.narrow(dim, (images.shape[dim] - length) // 2, length)
    return images


def flip(images: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """Flip an image left to right where ``coins``, (B,) or (B, 1) bool, is True."""
    return torch.where(_per_image(coins), images.flip(3), images)


def turn(images: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotate and flip each image by one of the eight symmetries of a square.

    Args:
        images: (B, C, H, H), any dtype.
        turns: (B,) or (B, 1) int64, from 0 to 7, as returned by ``draws.integers(8)``: ``turns %
            4`` counter-clockwise quarter turns; from 4 on, the image is first flipped left to
            right.

    Raises:
        SettingError: the images are not square.
    """
    b, c, height, width = images.shape
    if height != width:
        raise SettingError("images", f"{height} x {width} pixels", "squares", "crop them first")
    sources = _symmetries(height)[turns.reshape(b)]  # (B, H * H)
    return _gathered(images, sources).view(b, c, height, width)


def brightness(images: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    """Add ``deltas``, (B,) or (B, 1) float32, to all pixels of each image. No clipping."""
    return images + _per_image(deltas)


def contrast(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Scale the distance of each pixel from the mean of its channel.

    As tf.image.adjust_contrast. No clipping.

    Args:
        images: (B, C, H, W), numbers.
        factors: (B,) or (B, 1) float32, the scale of each image.
    """
    values = images.to(torch.float32)
    means = _means(values.flatten(2))[..., None, None]
    return (values - means).mul_(_per_image(factors)).add_(means)


def standardize(images: torch.Tensor) -> torch.Tensor:
    """Scale each image to mean 0 and variance 1 over all channels; returns float32.

    As tf.image.per_image_standardization: a standard deviation below 1 / sqrt(C * H * W) counts as
    that value, so an image of one color becomes zeros.
    """
    values = images.to(torch.float32).flatten(1)
    centered = values - _means(values)[:, None]
    deviations = _means(centered.square()).sqrt_()
    least = values.shape[1] ** -0.5
    return centered.div_(deviations.clamp_(min=least)[:, None]).view(images.shape)


def _per_image(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, 1, 1, 1)


def _first(place: torch.Tensor, length: int, window: int) -> torch.Tensor:
    """Return the first row or column of the window in each image, (B,) int64."""
    last = length - window
    # In float64, a number below 1 times a count stays below the count.
    return (place.double() * (last + 1)).long().clamp_(0, last)


def _gathered(images: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """Take pixels of each image by their numbers, row by row: (B, C, H, W), (B, n) -> (B, C, n)."""
    flat = images.flatten(2)
    return flat.gather(2, sources[:, None].expand(-1, flat.shape[1], -1))


def _fitting(images: torch.Tensor, size: tuple[int, int], dim: int) -> int:
    """Return the length of a window along dimension 2 or 3."""
    length = size[dim - 2]
    if not 0 < length <= images.shape[dim]:
        got = f"{size[0]} x {size[1]} pixels"
        have = f"from 1 x 1 to the {images.shape[2]} x {images.shape[3]} of the images"
        raise SettingError("size", got, have, "choose a smaller one, or pad the images")
    return length


def _means(values: torch.Tensor) -> torch.Tensor:
    """Return means over the last dimension, (..., n) -> (...).

    Halves are added until a single number is left. ``torch.mean`` may choose a different order for
    a different batch, or with more threads.
    """
    n = values.shape[-1]
    while (left := values.shape[-1]) > 1:
        half = left // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        if left % 2:
            folded[..., 0] += values[..., -1]
        values = folded
    return values.squeeze(-1) / n


@lru_cache(maxsize=4)
def _symmetries(side: int) -> torch.Tensor:
    """Return the source of each pixel of a turned square, (8, side * side) int64."""
    pixels = torch.arange(side * side).view(side, side)
    return torch.stack(
        [torch.rot90(p, k).reshape(-1) for p in (pixels, pixels.flip(1)) for k in range(4)]
    )
