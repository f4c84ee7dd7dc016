"""The means of comparing two trainings: SHA-256 over all bits of their weights."""

import hashlib
from collections.abc import Iterable

import torch

import quorate


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the digest of named tensors, as ``quorate inspect`` shows the digest of a model.

    Per tensor: name, shape and dtype, each followed by a NUL, and the bytes of the elements in
    row-major order.
    """
    total = hashlib.sha256()
    for name, tensor in tensors:
        total.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        flat = dense.resolve_conj().resolve_neg().cpu().contiguous()
        # A tensor with a single element is contiguous with any stride.
        flat = flat.as_strided((flat.numel(),), (1,))
        total.update(flat.view(torch.uint8).numpy())
    return total.hexdigest()


def digest_of(trainer: quorate.Trainer) -> str:
    """Return the digest of a trainer's weights and buffers, averaged ones included if any."""
    models = [trainer.model, trainer.averaged_model]
    return digest(item for m in models if m is not None for item in m.state_dict().items())
