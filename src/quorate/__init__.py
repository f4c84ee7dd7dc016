"""quorate: one PyTorch model, every device you have, the same bits on any number of them."""

from quorate.callbacks import Callback
from quorate.errors import QuorateError, UserError
from quorate.report import Report
from quorate.trainer import Trainer

__all__ = ["Callback", "QuorateError", "Report", "Trainer", "UserError"]
__version__ = "0.1.0"
