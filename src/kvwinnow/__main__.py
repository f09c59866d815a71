"""``python -m kvwinnow`` is the command line."""

import sys

from kvwinnow.cli import main

if __name__ == "__main__":
    sys.exit(main())
