"""A replica over several devices, as the script places its parts: misfits."""

from typing import Any

import pytest
import torch
from support.messages import expect_error
from torch import nn

from quorate.errors import SettingError
from quorate.machine.devices import Group
from quorate.replica.spread import DeviceSpread

CPU, META = torch.device("cpu"), torch.device("meta")


def two_parts() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device=META))


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (nn.Linear(2, 2), [(CPU, META)]),
        (two_parts(), [(CPU, META), (CPU,)]),
        (two_parts(), [(CPU, CPU)]),
    ],
)
def test_what_does_not_fit_is_refused(model: nn.Module, groups: Any) -> None:
    with expect_error(SettingError):
        DeviceSpread(model, [Group(group) for group in groups])
