"""The random stream of a shard on a GPU, which goes from stage to stage with the shard.

On GPUs it has two parts: the host's generator, and that of the device. A stage goes on where the
one before it left both, on whatever device that was: a state is the same on all GPUs of a kind. So
a shard draws what it would draw on one device.
"""

from __future__ import annotations

import torch

from quorate.replica.device_generators import reseed_devices
from quorate.replica.streams import Stream


class DeviceStream:
    """A thread's stream with the generator of a device, which nobody else uses meanwhile.

    It is its own ``generator``: what has the state of both.

    Args:
        stream: the thread's.
        device: a GPU.
    """

    drawn = True  # what kernels have drawn is not asked

    def __init__(self, stream: Stream, device: torch.device) -> None:
        self._stream, self._device = stream, device

    def reseed(self, seed: int) -> None:
        """Start both over."""
        self._stream.reseed(seed)
        reseed_devices((self._device,), seed)

    @property
    def generator(self) -> DeviceStream:
        """What has the state."""
        return self

    def get_state(self) -> torch.Tensor:
        """Return the states of both, one after the other: uint8, on the host."""
        module = torch.get_device_module(self._device)
        return torch.cat([self._stream.generator.get_state(), module.get_rng_state(self._device)])

    def set_state(self, state: torch.Tensor) -> None:
        """Have both go on from there."""
        generator = self._stream.generator
        size = len(generator.get_state())
        generator.set_state(state[:size].clone())
        module = torch.get_device_module(self._device)
        module.set_rng_state(state[size:].clone(), self._device)
