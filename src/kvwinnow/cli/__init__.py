"""The command line, ``kvwinnow``. Nothing here imports torch before a command needs it."""

from kvwinnow.cli.app import main

__all__ = ["main"]
