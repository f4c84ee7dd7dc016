"""torch's SummaryWriter over an event file that never blocks, for the entries of callbacks."""

from __future__ import annotations

from typing import Any

from torch.utils.tensorboard import FileWriter, SummaryWriter

from quorate.services.tensorboard.event_file import EventFile


class BufferedSummaryWriter(SummaryWriter):
    """torch's SummaryWriter, whose entries are on disk after the service's next tick.

    ``add_scalars`` and ``add_hparams`` open torch's own files in subfolders, until ``close``.
    """

    def __init__(self, events: EventFile) -> None:
        self._files = _EventFiles(events)
        super().__init__(str(events.folder))

    def _get_file_writer(self) -> Any:
        """Return the target of all of torch's methods that add events."""
        if self.all_writers is None:
            self.file_writer: Any = self._files
            self.all_writers: Any = {str(self.log_dir): self._files}
        return self._files


class _EventFiles(FileWriter):
    def __init__(self, events: EventFile) -> None:
        self.event_writer: Any = _EventWriter(events)


class _EventWriter:
    """The methods of TensorBoard's EventFileWriter that torch's FileWriter calls."""

    def __init__(self, events: EventFile) -> None:
        self._folder = str(events.folder)
        self.add_event = events.add

    def get_logdir(self) -> str:
        return self._folder

    def flush(self) -> None:
        """Do nothing: the service flushes, in its own thread."""

    def close(self) -> None:
        """Do nothing: no file is open, and the service continues."""
