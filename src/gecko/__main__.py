"""``python -m gecko``."""

from gecko.cli import main

main()
