"""The interface of torch for accelerators: memory of its own, errors, no forks."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn


def test_the_host_cannot_touch_the_memory() -> None:
    touch = (
        "import ctypes, torch\n"
        "values = torch.ones(4, device='sim:0')\n"
        "torch.accelerator.synchronize(0)\n"
        "ctypes.string_at(values.data_ptr(), 4)\n"
    )
    ended = subprocess.run([sys.executable, "-c", touch], capture_output=True, check=False)
    assert ended.returncode == -11, ended.stderr


def test_memory_that_nothing_was_written_to_is_not_a_number() -> None:
    assert torch.empty(8, device="sim:0").isnan().all().item()


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "l1_loss"])
def test_a_loss_and_its_gradient_have_the_bits_of_the_cpu(name: str) -> None:
    values, found = torch.randn(2, 8, 4), []
    for device in ("cpu", "sim:0"):
        computed, target = values.to(device)
        loss = getattr(nn.functional, name)(computed.requires_grad_(), target)
        found.append([loss.cpu(), torch.autograd.grad(loss, computed)[0].cpu()])
    assert all(map(torch.equal, *found))


def test_what_a_kernel_raises_comes_with_the_next_synchronisation() -> None:
    table = torch.ones(3, 2, device="sim:2")
    made = nn.functional.embedding(torch.tensor([7], device="sim:2"), table)
    with pytest.raises(IndexError):
        torch.accelerator.synchronize(2)
    del made


def test_a_child_of_a_process_that_has_used_it_cannot() -> None:
    torch.ones(2, device="sim:0")
    child = os.fork()
    if child == 0:
        try:
            torch.ones(2, device="sim:0")
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
