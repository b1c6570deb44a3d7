"""State of CEMA before the first token of a context rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gecko.ops.cema import CEMACoefficients, cema
from gecko.segments import ContextExchange, PendingTensors, Segments


@dataclass(frozen=True)
class PendingCEMAState:
    """State before this rank's first token, (B, D, N, 2), of which the part from earlier ranks is on its way."""

    ends: PendingTensors
    state: Tensor | None
    coefficients: CEMACoefficients
    exchange: ContextExchange
    length: int

    @classmethod
    def start(
        cls, x: Tensor, coefficients: CEMACoefficients, state: Tensor | None, segments: Segments,
        exchange: ContextExchange,
    ) -> PendingCEMAState:  # fmt: skip
        """Send the state that this rank's tokens x (B, T, D) leave to later ranks.

        ``state`` is that before the call on rank 0; on the other ranks it is None.
        """
        _, end = cema(x, coefficients, state, segments=segments)
        return cls(exchange.send(to_later=[end]), state, coefficients, exchange, x.shape[1])

    def wait(self) -> Tensor:
        """Return the state. That of each earlier rank is decayed over the tokens of the ranks between."""
        (ends,) = self.ends.wait()
        between = self.length * torch.arange(len(ends), device=ends.device).view(-1, 1, 1)
        kept = torch.view_as_complex(ends) * self.coefficients.decay(between).unsqueeze(1)
        arrived = torch.view_as_real((kept * (self.exchange.counts > 0)[..., None, None]).sum(0))
        return arrived if self.state is None else self.state + arrived
