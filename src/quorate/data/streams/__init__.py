"""Map-style datasets for files that are usually read from front to back.

::

    train = TarDataset(sorted(Path("shards").glob("*.tar")), decode=picture_and_class)
    lines = LinesDataset("corpus.jsonl", json.loads)
    rows = Stream(files, read_parquet, counts=counts)  # any format that is read from the start

Each row has a number, and the row order of an epoch is a function of these numbers. The bits are
therefore independent of the workers, and a resume is exact in the middle of an epoch. Tar files and
line files are indexed once. All other files are counted once, and read in windows.
"""

from quorate.data.streams.lines import LinesDataset
from quorate.data.streams.stream import Stream
from quorate.data.streams.tar import TarDataset
from quorate.data.streams.windows import Windows, windows

__all__ = ["LinesDataset", "Stream", "TarDataset", "Windows", "windows"]
