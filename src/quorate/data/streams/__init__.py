"""Streams: files that are read from front to back elsewhere, here with a position for each row.

::

    train = TarDataset(sorted(Path("shards").glob("*.tar")), decode=picture_and_class)
    lines = LinesDataset("corpus.jsonl", json.loads)
    rows = Stream(files, read_parquet, counts=counts)  # whatever can be read from its beginning

What makes bits independent of workers, and a resume exact in the middle of an epoch, is that a row
has a number, and that the order of an epoch is a function of numbers. Files of tar and of lines get
an index for it, once, and are map-style then. What has none is counted, and read in windows.
"""

from quorate.data.streams.lines import LinesDataset
from quorate.data.streams.stream import Stream
from quorate.data.streams.tar import TarDataset
from quorate.data.streams.windows import Windows, windows

__all__ = ["LinesDataset", "Stream", "TarDataset", "Windows", "windows"]
