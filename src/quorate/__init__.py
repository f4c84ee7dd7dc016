"""Train a PyTorch model on every device, with bit-identical weights on any number of devices.

Names are imported on first use: ``import quorate`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quorate.coordination.sampling import Sampling
    from quorate.data.draws import Draws
    from quorate.data.loading import Loading
    from quorate.engines.worker_role import is_worker
    from quorate.engines.workers import Workers
    from quorate.errors import QuorateError, UserError
    from quorate.replica.beside.at import At
    from quorate.replica.beside.shared import Shared
    from quorate.replica.compute import Compute
    from quorate.replica.outputs.collect import Collect
    from quorate.replica.phases.phase import Phase
    from quorate.replica.whole_batch.gather import Gather
    from quorate.services.checkpoints.weights import load_weights
    from quorate.services.report import Report
    from quorate.services.run_directory.settings import RunDir
    from quorate.simulation.simulate import simulate
    from quorate.trainer import Trainer
    from quorate.training.callbacks import Callback, Run
    from quorate.training.optimizing.optimize import Optimize
    from quorate.training.validation import Validation

__all__ = [
    "At",
    "Callback",
    "Collect",
    "Compute",
    "Draws",
    "Gather",
    "Loading",
    "Optimize",
    "Phase",
    "QuorateError",
    "Report",
    "Run",
    "RunDir",
    "Sampling",
    "Shared",
    "Trainer",
    "UserError",
    "Validation",
    "Workers",
    "is_worker",
    "load_weights",
    "simulate",
]
__version__ = "0.1.0"

_MODULES = {
    "At": "replica.beside.at",
    "Callback": "training.callbacks",
    "Collect": "replica.outputs.collect",
    "Compute": "replica.compute",
    "Draws": "data.draws",
    "Gather": "replica.whole_batch.gather",
    "Loading": "data.loading",
    "Optimize": "training.optimizing.optimize",
    "Phase": "replica.phases.phase",
    "QuorateError": "errors",
    "Report": "services.report",
    "Run": "training.callbacks",
    "RunDir": "services.run_directory.settings",
    "Sampling": "coordination.sampling",
    "Shared": "replica.beside.shared",
    "Trainer": "trainer",
    "UserError": "errors",
    "Validation": "training.validation",
    "Workers": "engines.workers",
    "is_worker": "engines.worker_role",
    "load_weights": "services.checkpoints.weights",
    "simulate": "simulation.simulate",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
