"""Entry point of ``python -m gecko``."""

from gecko.cli import main

main()
