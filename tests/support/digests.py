"""What two trainings are compared by."""

from __future__ import annotations

import quorate
from quorate.replica.digest import digest


def digest_of(trainer: quorate.Trainer) -> str:
    """Return the digest of a trainer's weights and buffers, the averaged ones included."""
    assert trainer.averaged_model is not None
    averaged = trainer.averaged_model.state_dict()
    return digest([*trainer.model.state_dict().items(), *averaged.items()])
