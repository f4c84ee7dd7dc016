"""Operations on batches of images, (B, C, H, W): what augmentation is made of.

They draw nothing. What happens to image i is said by row i of an argument, as ``Draws`` gives it,
so the same can be done to an image and to its mask::

    places = draws.uniform(2)
    image, mask = crop(image, places, (64, 64)), crop(mask, places, (64, 64))

Of an image every bit is the same in any batch and at any place in it: all is made of copies and of
operations on elements, each of which is correctly rounded, and what is added up is added in an
order that depends on the size of an image alone.

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
    """Cut a window out of each image.

    Args:
        images: (B, C, H, W), any dtype.
        places: (B, 2), from 0 to 1: where the window is, from top to bottom and from left to right.
            ``draws.uniform(2)`` makes all places equally likely.
        size: (h, w) of the windows.
        padding: pixels of zeros that are first put around the images.

    Returns:
        (B, C, h, w).

    Raises:
        SettingError: a window is larger than an image.
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
    """Cut the middle out of each image, (B, C, h, w): a view.

    Raises:
        SettingError: it is larger than an image.
    """
    lengths = {dim: _fitting(images, size, dim) for dim in (2, 3)}
    for dim, length in lengths.items():
        images = images.narrow(dim, (images.shape[dim] - length) // 2, length)
    return images


def flip(images: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """Exchange left and right where the coin, (B,) or (B, 1) bool, is true."""
    return torch.where(_per_image(coins), images.flip(3), images)


def turn(images: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn and flip images: one of the eight symmetries of a square for each.

    Args:
        images: (B, C, H, H), any dtype.
        turns: (B,) or (B, 1) int64, from 0 to 7, as of ``draws.integers(8)``: ``turns % 4`` quarter
            turns, counter-clockwise; from 4 on the image is flipped first, left to right.

    Raises:
        SettingError: the images are no squares.
    """
    b, c, height, width = images.shape
    if height != width:
        raise SettingError("images", f"{height} x {width} pixels", "squares", "crop them first")
    sources = _symmetries(height)[turns.reshape(b)]  # (B, H * H)
    return _gathered(images, sources).view(b, c, height, width)


def brightness(images: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    """Add to all pixels of an image its delta, (B,) or (B, 1) float32; nothing is cut off."""
    return images + _per_image(deltas)


def contrast(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Scale an image's distances from the mean of each channel by its factor.

    As tf.image.adjust_contrast does; nothing is cut off.

    Args:
        images: (B, C, H, W), numbers.
        factors: (B,) or (B, 1) float32.
    """
    values = images.to(torch.float32)
    means = _means(values.flatten(2))[..., None, None]
    return (values - means).mul_(_per_image(factors)).add_(means)


def standardize(images: torch.Tensor) -> torch.Tensor:
    """Scale each image to mean 0 and variance 1, over all its channels; float32.

    As tf.image.per_image_standardization does: the deviation counts as 1 / sqrt(C * H * W) where it
    is less, so that an image of one colour becomes zeros.
    """
    values = images.to(torch.float32).flatten(1)
    centered = values - _means(values)[:, None]
    deviations = _means(centered.square()).sqrt_()
    least = values.shape[1] ** -0.5
    return centered.div_(deviations.clamp_(min=least)[:, None]).view(images.shape)


def _per_image(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, 1, 1, 1)


def _first(place: torch.Tensor, length: int, window: int) -> torch.Tensor:
    """Return where a window begins in each image, (B,) int64."""
    last = length - window
    # In float64, where a number below 1 times a count stays below the count.
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

    One half is added to the other until one number is left. ``torch.mean`` may choose another order
    for another batch, or on more threads.
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
    """Return where each pixel of a turned square comes from, (8, side * side) int64."""
    pixels = torch.arange(side * side).view(side, side)
    return torch.stack(
        [torch.rot90(p, k).reshape(-1) for p in (pixels, pixels.flip(1)) for k in range(4)]
    )
