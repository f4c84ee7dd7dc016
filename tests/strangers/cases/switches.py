"""Switches of the whole process, turned inside of forward."""

import builtins
from typing import Any

import torch
import torch.nn.functional as F
from case import REFUSED, SAID, SAME, Case, case, cross_entropy, forward, loss
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

TURNS = "workers compute one at a time, because "


@forward(says=f"{TURNS}sdpa_kernel (switches.py:")
def attention_kernel_chosen(self: Any, x: Tensor) -> Tensor:
    h = x[:, None]
    with sdpa_kernel(SDPBackend.MATH):
        h = F.scaled_dot_product_attention(h, h, h)
    return self.net(x + h[:, 0])


@forward(says=f"{TURNS}torch.set_default_dtype (switches.py:")
def default_dtype_in_forward(self: Any, x: Tensor) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    scale = torch.ones(8).cumsum(0)
    torch.set_default_dtype(before)
    return self.net((x * (1 / scale)).float())


# --- switches left turned by a shard: the next shard finds the former setting ---------------------


def leaves(name: str, says: str, owner: Any, function: str, *given: Any, **more: Any) -> None:
    """List a loss that calls a function by ways not visible in the loss's code."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = cross_entropy(model, batch) * torch.full((3,), 0.1).sum()
        getattr(owner, function)(*given, **more)
        return value

    said = f"{TURNS}a shard changes {says}" if says else ""
    case(lambda: Case(SAME, says=said, loss=loss, plain=False), f"leaves_{name}")


GPU = torch.accelerator.is_available()  # else these switches do not matter
cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
leaves("dtype", "the default dtype", torch, "set_default_dtype", torch.float64)
leaves("precision", "float32_matmul_", torch, "set_float32_matmul_precision", "high")
leaves("deterministic", "deterministic alg", torch, "set_deterministic_debug_mode", 1)
leaves("flash", "flash attention", cuda, "enable_flash_sdp", False)
leaves("efficient", GPU * "memory-efficient attention", cuda, "enable_mem_efficient_sdp", False)
leaves("plain_attention", "plain attention", cuda, "enable_math_sdp", False)
leaves("cudnn_attention", GPU * "cuDNN's attention", cuda, "enable_cudnn_sdp", False)
leaves("onednn", "oneDNN", mkldnn, "set_flags", False)
leaves("cudnn", GPU * "cuDNN", cudnn, "set_flags", _enabled=False)
leaves("benchmark", GPU * "cudnn.benchmark", cudnn, "set_flags", _benchmark=True)
leaves("repeatable", GPU * "cudnn.deterministic", cudnn, "set_flags", _deterministic=True)
leaves("tf32", "float32_matmul_", builtins, "setattr", cuda.matmul, "allow_tf32", True)
leaves("conv", GPU * "the precision", builtins, "setattr", cudnn.conv, "fp32_precision", "tf32")
# Those of the thread.
leaves("gradients", "", torch, "set_grad_enabled", False)
leaves("threads", "", torch, "set_num_threads", 2)
leaves("autocast", "", torch, "set_autocast_enabled", "cpu", True)


@loss(SAME)
def modes_forgotten(model: nn.Module, batch: Any) -> Tensor:
    assert model.training
    value = cross_entropy(model, batch)
    model.eval()
    return value


@forward(
    (SAME, SAID, REFUSED),
    state=lambda: {"table": nn.Parameter(torch.randn(4, 8))},
    plain=False,
    options=("--threads", "2"),
)
def two_threads_and_index_put(self: Any, x: Tensor) -> Tensor:
    """Adds to few rows of a table from many places, on two threads."""
    places = (x * 100).long().repeat(1, 200) % 4
    return self.net(self.table[places].mean(1))
