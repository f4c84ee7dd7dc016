"""quorate: one PyTorch model, every device you have, the same bits on any number of them."""

from quorate.errors import QuorateError, UserError
from quorate.services.report import Report
from quorate.trainer import Trainer
from quorate.training.callbacks import Callback

__all__ = ["Callback", "QuorateError", "Report", "Trainer", "UserError"]
__version__ = "0.1.0"
