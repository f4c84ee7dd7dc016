"""Film a run in a terminal: `python docs/film.py` makes three pictures of one run, in docs/_static.

The run is a real one, in a pseudo-terminal of 100 columns: the main job on two worker processes,
one of which is killed with signal 9 on the way. What it writes goes through an emulator of a
terminal, and the screen is drawn as it is at three moments: when workers are at work, when one was
killed, and at the end. It needs the extras `docs`, `examples` and `bench`, and Fashion-MNIST.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib
import psutil
import pyte
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 100, 16
WORDS = [
    *("quorate", "run", "--devices", "cpu", "--workers", "2"),
    *("examples/fashion_mnist.py", "--target", "0.7", "--epochs"),
]
MOST_S = 900.0  # on a machine that has other work
TABLE = "worker  device"
STARTING = re.compile(r"^\d+ .*\bstarting *$", re.MULTILINE)  # a row of it

SIZE, LINE = 14, 18  # pixels: of a letter, of a row
MARGIN = 12
GROUND, INK = "#16181d", "#d8dbe0"
COLOURS = {
    "default": INK,
    "black": "#5b6170",
    "red": "#e06c75",
    "green": "#98c379",
    "brown": "#d8b56a",
    "blue": "#61afef",
    "magenta": "#c678dd",
    "cyan": "#56b6c2",
    "white": INK,
}


class Film:
    """A run in a pseudo-terminal, and the screen that it would be on.

    Args:
        words: of the command that is shown; it is run by this interpreter.
        folder: that it is run in.
    """

    def __init__(self, words: list[str], folder: Path) -> None:
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self._stream.feed(f"$ {' '.join(words)}\r\n".encode())
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        environment["TERM"] = "xterm-256color"
        self.run = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self._ours = ours

    def until(self, is_there: Callable[[str], bool]) -> str:
        """Let it run until the screen has something; return the screen's text.

        Raises:
            RuntimeError: the run has ended, or takes too long.
        """
        end = time.monotonic() + MOST_S
        while not is_there(text := "\n".join(self._screen.display)):
            if time.monotonic() > end or not self._feed():
                raise RuntimeError(f"the run never came to that moment; it is at:\n{text}")
        return text

    def for_a_while(self, seconds: float) -> None:
        """Let it run."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._feed():
            pass

    def to_the_end(self) -> int:
        """Let it run to its end, and return its exit code."""
        while self._feed():
            pass
        return self.run.wait()

    def picture(self) -> Image.Image:
        """Draw the screen as it is."""
        fonts = {bold: font(bold=bold) for bold in (False, True)}
        width = fonts[False].getlength("M")
        size = int(COLUMNS * width) + 2 * MARGIN, ROWS * LINE + 2 * MARGIN
        image = Image.new("RGB", size, GROUND)
        draw = ImageDraw.Draw(image)
        for y in range(ROWS):
            for x in range(COLUMNS):
                cell = self._screen.buffer[y][x]
                ink, ground = colour(cell.fg, INK), colour(cell.bg, GROUND)
                if cell.reverse:
                    ink, ground = ground, ink
                at = MARGIN + x * width, MARGIN + y * LINE
                if ground != GROUND:
                    draw.rectangle((*at, at[0] + width, at[1] + LINE), fill=ground)
                if cell.data.strip():
                    draw.text(at, cell.data, fill=ink, font=fonts[cell.bold])
        return image.quantize(32)

    def _feed(self) -> bool:
        """Take what there is for a moment; return False at the end."""
        if select.select([self._ours], [], [], 0.05)[0]:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:  # the other end is closed
                return False
            self._stream.feed(data)
        return True


def font(*, bold: bool) -> ImageFont.FreeTypeFont:
    """Return matplotlib's own monospaced font: it is the same on all machines."""
    name = "DejaVuSansMono-Bold.ttf" if bold else "DejaVuSansMono.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)), SIZE)


def colour(name: str, default: str) -> str:
    """Return a colour of the emulator's: a name, or six hexadecimal digits."""
    if name == "default":
        return default
    return COLOURS.get(name.removeprefix("bright"), f"#{name}")


def worker_of(run: psutil.Process) -> psutil.Process:
    """Return a process that computes shards: of all that belong to the run, the busiest."""
    return max(run.children(recursive=True), key=lambda each: sum(each.cpu_times()[:2]))


def main() -> None:
    """Film the run, and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "_static", metavar="FOLDER")
    parser.add_argument("--epochs", default="3", help="3 take a minute on two cores")
    options = parser.parse_args()
    to = options.to
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or the run would go on by itself
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "examples").symlink_to(ROOT / "examples")
        film = Film([*WORDS, options.epochs], Path(folder))
        try:
            film.until(lambda text: TABLE in text and "examples/s" in text)
            film.for_a_while(8.0)  # workers are warm then, and the table has their times
            film.picture().save(to / "run-begins.png", optimize=True)
            worker_of(psutil.Process(film.run.pid)).send_signal(signal.SIGKILL)
            # Its row says so at the table's next turn, which comes after two seconds or so.
            film.until(lambda text: bool(STARTING.search(text)) or "is back after" in text)
            film.picture().save(to / "run-loses-a-worker.png", optimize=True)
            code = film.to_the_end()
            text = film.until(lambda _: True)
            film.picture().save(to / "run-ends.png", optimize=True)
        finally:
            if film.run.poll() is None:
                film.run.kill()
    print(text)
    if code:
        sys.exit(f"the run ended with exit code {code}")


if __name__ == "__main__":
    main()
