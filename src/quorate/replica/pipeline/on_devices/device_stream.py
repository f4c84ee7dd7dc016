"""The random stream of a shard on a GPU, passed from stage to stage with the shard.

On GPUs a stream has two parts: the host's generator and the device's. A stage continues from the
positions of the previous stage, on any device: a state is valid on all GPUs of a kind. So a shard
draws the same numbers as on a single device.
"""

from __future__ import annotations

import torch

from quorate.replica.device_generators import reseed_devices
from quorate.replica.streams import Stream


class DeviceStream:
    """A thread's stream together with the generator of a device in exclusive use.

    The object is its own ``generator``, with the state of both generators.

    Args:
        stream: the thread's stream.
        device: a GPU.
    """

    drawn = True  # draws of kernels are not observed

    def __init__(self, stream: Stream, device: torch.device) -> None:
        self._stream, self._device = stream, device

    def reseed(self, seed: int) -> None:
        """Restart both generators."""
        self._stream.reseed(seed)
        reseed_devices((self._device,), seed)

    @property
    def generator(self) -> DeviceStream:
        """The object with the state: this object."""
        return self

    def get_state(self) -> torch.Tensor:
        """Return the states of both generators in a row: uint8, on the host."""
        module = torch.get_device_module(self._device)
        return torch.cat([self._stream.generator.get_state(), module.get_rng_state(self._device)])

    def set_state(self, state: torch.Tensor) -> None:
        """Let both generators continue from a state."""
        generator = self._stream.generator
        size = len(generator.get_state())
        generator.set_state(state[:size].clone())
        module = torch.get_device_module(self._device)
        module.set_rng_state(state[size:].clone(), self._device)
