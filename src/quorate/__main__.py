"""``python -m quorate`` is the ``quorate`` command."""

import sys

from quorate.cli import main

if __name__ == "__main__":
    sys.exit(main())
