"""The command line: one file for each command."""

from gecko.cli.app import app, main

__all__ = ["app", "main"]
