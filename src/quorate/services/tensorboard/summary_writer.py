"""torch's SummaryWriter, over an event file that blocks nobody: for what callbacks add."""

from __future__ import annotations

from typing import Any

from torch.utils.tensorboard import FileWriter, SummaryWriter

from quorate.services.tensorboard.event_file import EventFile


class BufferedSummaryWriter(SummaryWriter):
    """torch's SummaryWriter, but that what is added is on disk after the service's next tick.

    ``add_scalars`` and ``add_hparams`` open files of torch's own in folders below, until ``close``.
    """

    def __init__(self, events: EventFile) -> None:
        self._files = _Files(events)
        super().__init__(str(events.folder))

    def _get_file_writer(self) -> Any:
        """Return where all of its methods add events."""
        if self.all_writers is None:
            self.file_writer: Any = self._files
            self.all_writers: Any = {str(self.log_dir): self._files}
        return self._files


class _Files(FileWriter):
    def __init__(self, events: EventFile) -> None:
        self.event_writer: Any = _Events(events)


class _Events:
    """What FileWriter asks of TensorBoard's EventFileWriter."""

    def __init__(self, events: EventFile) -> None:
        self._folder = str(events.folder)
        self.add_event = events.add

    def get_logdir(self) -> str:
        return self._folder

    def flush(self) -> None:
        """Do nothing: the disk is the service's to wait for."""

    def close(self) -> None:
        """Do nothing: no file is open, and the service goes on."""
