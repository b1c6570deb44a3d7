"""State of CEMA before the first token of a call, whose earlier tokens other ranks may hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gecko.ops.cema import CEMACoefficients, cema
from gecko.segments import Pending, Segments


def cema_state_before(
    x: Tensor, coefficients: Callable[[], CEMACoefficients], state: Tensor | None, segments: Segments
) -> Pending[Tensor | None]:
    """Return the state before the tokens x (B, T, D), (B, D, N, 2). A rank sends what x adds to later ranks.

    ``state`` is that before the call; on ranks after the first it is None. Only ranks need ``coefficients``.
    """
    exchange = segments.exchange
    if exchange is None:
        return lambda: state
    filters = coefficients()

    def receive() -> Tensor:
        """Decay the state of each earlier rank over the tokens of the ranks between."""
        (ends,) = arriving()
        between = x.shape[1] * torch.arange(len(ends), device=ends.device).view(-1, 1, 1)
        kept = torch.view_as_complex(ends) * filters.decay(between).unsqueeze(1)
        earlier = torch.view_as_real((kept * (exchange.counts > 0)[..., None, None]).sum(0))
        return earlier if state is None else state + earlier

    _, end = cema(x, filters, state, segments=segments)
    arriving = exchange.send((), [end])
    return receive
