"""Whether tensors are still what they were."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from torch import Tensor


def identity(tensors: Iterable[Tensor]) -> Hashable:
    """Equal as long as none of them was replaced, converted or written to; writes through ``.data`` go unseen.

    Tensors made in inference mode count no writes, so of those only replacements show.
    """
    return tuple((x.data_ptr(), x.dtype, 0 if x.is_inference() else x._version) for x in tensors)
