"""``python -m quorate``: the ``quorate`` command."""

import sys

from quorate.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
