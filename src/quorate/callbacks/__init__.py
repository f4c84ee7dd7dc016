"""Callbacks for common tasks: early stopping, learning rates, logging to other services."""

from quorate.callbacks.loggers import LearningRateMonitor, LogLines, MLflow, WandB
from quorate.callbacks.plateaus import EarlyStopping, ReduceLROnPlateau
from quorate.callbacks.samples import Samples
from quorate.training.callbacks import Callback

__all__ = [
    "Callback",
    "EarlyStopping",
    "LearningRateMonitor",
    "LogLines",
    "MLflow",
    "ReduceLROnPlateau",
    "Samples",
    "WandB",
]
