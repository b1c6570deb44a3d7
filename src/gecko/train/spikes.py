"""Which steps are skipped because their loss or gradient stands out from those before."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

from gecko.train.settings import SkipSettings


class SpikeRule:
    """A step is a spike whose loss, or gradient norm, is far above the mean of the last steps.

    Spikes are remembered like other steps: where the loss has moved for good, they soon stop being spikes.
    """

    def __init__(self, settings: SkipSettings, losses: Iterable[float] = (), grad_norms: Iterable[float] = ()) -> None:
        self.settings = settings
        self.losses = deque(losses, maxlen=settings.window)
        self.grad_norms = deque(grad_norms, maxlen=settings.window)

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """Why this step, of finite numbers, is a spike; None where it is none. It is remembered either way."""
        found = self._compare("loss", loss, self.losses) or self._compare("gradient norm", grad_norm, self.grad_norms)
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        return found

    def _compare(self, name: str, value: float, before: deque[float]) -> str | None:
        limit = self.settings.deviations
        if limit is None or len(before) < max(2, self.settings.window // 2):
            return None
        mean, deviation = statistics.fmean(before), statistics.stdev(before)
        if value - mean <= limit * deviation:
            return None
        return (
            f"the {name} {value:.4g} is more than {limit:g} standard deviations of {deviation:.3g} "
            f"above the mean {mean:.4g} of the last {len(before)} steps"
        )
