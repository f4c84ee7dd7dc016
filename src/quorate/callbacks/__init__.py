"""Callbacks for common tasks: early stopping, learning rates, logging to other services."""

from quorate.callbacks.early_stopping import EarlyStopping
from quorate.callbacks.learning_rates import LearningRateMonitor
from quorate.callbacks.log_lines import LogLines
from quorate.callbacks.loggers import MLflow, WandB
from quorate.callbacks.plateau import ReduceLROnPlateau
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
