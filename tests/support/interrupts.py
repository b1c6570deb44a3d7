"""Interrupts for processes that tests start."""

import signal


def take_interrupts() -> None:
    """Restore the default handler of SIGINT; for ``preexec_fn``. Shells start background jobs with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
