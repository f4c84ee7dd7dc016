"""Operations of an augmentation on images: as their formulas, alone as in a batch."""

import math
from typing import Any

import pytest
import torch
from support.messages import expect_error

from quorate import Draws
from quorate.data import images as ops
from quorate.errors import SettingError

B, C, H, W = 13, 3, 9, 12


def pictures(kind: torch.dtype = torch.uint8, shape: tuple[int, ...] = (B, C, H, W)) -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, generator=generator).to(kind)


def test_crop_cuts_the_window_that_is_said() -> None:
    images, places = pictures(), Draws(0, 0, range(B)).uniform(2)
    padded = torch.zeros(B, C, H + 4, W + 4, dtype=torch.uint8)
    padded[:, :, 2:-2, 2:-2] = images
    for source, padding, found in (
        (images, 0, ops.crop(images, places, (5, 10))),
        (padded, 2, ops.crop(images, places, (5, 10), padding=2)),
    ):
        for i, (down, right) in enumerate(places.tolist()):
            top = int(down * (H + 2 * padding - 5 + 1))
            left = int(right * (W + 2 * padding - 10 + 1))
            assert torch.equal(found[i], source[i, :, top : top + 5, left : left + 10])


def test_turn_makes_each_symmetry_of_a_square() -> None:
    images = pictures(shape=(8, C, H, H))
    found = ops.turn(images, torch.arange(8))
    for k in range(4):
        assert torch.equal(found[k], torch.rot90(images[k], k, (1, 2)))
        flipped = images[4 + k].flip(2)
        assert torch.equal(found[4 + k], torch.rot90(flipped, k, (1, 2)))
    same = images[:1].expand(8, -1, -1, -1)
    assert len({tuple(t.flatten().tolist()) for t in ops.turn(same, torch.arange(8))}) == 8


def test_flip_and_the_middle() -> None:
    images, coins = pictures(), torch.arange(B) % 2 == 0
    assert torch.equal(ops.flip(images, coins)[::2], images[::2].flip(3))
    assert torch.equal(ops.flip(images, coins)[1::2], images[1::2])
    assert torch.equal(ops.center_crop(images, (5, 6)), images[:, :, 2:7, 3:9])


def test_brightness_contrast_and_standardization_are_as_their_formulas() -> None:
    images, draws = pictures(), Draws(0, 0, range(B))
    deltas, factors = draws.uniform(low=-63, high=63), draws.uniform(low=0.2, high=1.8)
    exact = images.double()
    assert torch.equal(ops.brightness(images, deltas), images + deltas.view(B, 1, 1, 1))
    means = exact.mean((2, 3), keepdim=True)
    expected = (exact - means) * factors.view(B, 1, 1, 1) + means
    found = ops.contrast(images, factors).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    found = ops.standardize(images)
    assert found.dtype == torch.float32
    values = exact.flatten(1)
    means, deviations = values.mean(1, keepdim=True), values.std(1, correction=0, keepdim=True)
    expected = (values - means) / deviations
    torch.testing.assert_close(found.double().flatten(1), expected, rtol=1e-5, atol=1e-5)
    # A single colour; and almost a single colour: the deviation counts as 1 / sqrt(C * H * W).
    flat = torch.full((1, C, H, W), 7, dtype=torch.uint8)
    assert torch.equal(ops.standardize(flat), torch.zeros(1, C, H, W))
    nearly = flat.double()
    nearly[0, 0, 0, 0] += 0.5
    expected = (nearly - nearly.mean()) * math.sqrt(C * H * W)
    torch.testing.assert_close(ops.standardize(nearly).double(), expected, rtol=1e-5, atol=1e-5)


OPERATIONS: dict[str, Any] = {
    "crop": lambda x, d: ops.crop(x, d.uniform(2), (7, 7), padding=2),
    "center_crop": lambda x, _: ops.center_crop(x, (5, 5)),
    "flip": lambda x, d: ops.flip(x, d.coins()),
    "turn": lambda x, d: ops.turn(x, d.integers(8)),
    "brightness": lambda x, d: ops.brightness(x, d.uniform(low=-63, high=63)),
    "contrast": lambda x, d: ops.contrast(x, d.uniform(low=0.2, high=1.8)),
    "standardize": lambda x, _: ops.standardize(x),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("side", [9, 75])
def test_an_image_alone_has_the_bits_it_has_in_a_batch(name: str, side: int) -> None:
    """The bits depend on neither B, place, neighbours, layout, dtype nor the number of threads."""
    operation, rows = OPERATIONS[name], 17
    base = pictures(shape=(rows, C, side, side))
    for images in (base, base.float() / 3, base.to(memory_format=torch.channels_last)):
        before = images.clone()
        together = operation(images, Draws(0, 0, range(rows)))
        assert torch.equal(images, before)
        for some in ([0], [16], [12, 3], list(range(15, 4, -1))):
            found = operation(images[some], Draws(0, 0, some))
            assert torch.equal(found, together[some])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = operation(base, Draws(0, 0, range(rows)))
        torch.set_num_threads(3)
        assert torch.equal(operation(base, Draws(0, 0, range(rows))), one)
    finally:
        torch.set_num_threads(threads)


def test_images_that_do_not_fit_are_refused() -> None:
    with expect_error(SettingError, name="size", got="10 x 5 pixels"):
        ops.crop(pictures(), torch.zeros(B, 2), (10, 5))
    with expect_error(SettingError, name="size", got="5 x 0 pixels"):
        ops.center_crop(pictures(), (5, 0))
    with expect_error(SettingError, name="images", got="9 x 12 pixels"):
        ops.turn(pictures(), torch.zeros(B, dtype=torch.int64))
