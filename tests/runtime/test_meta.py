"""Models on the device ``meta`` have the shapes of real ones, and draw no random numbers."""

from __future__ import annotations

import pytest
import torch

from gecko.config import PRESETS, GeckoConfig
from gecko.models.gecko import Gecko
from gecko.runtime.tensors import meta_device


@pytest.mark.parametrize("preset", ["tiny", "megalodon-tiny"])
def test_shapes_are_those_of_a_real_model(preset: str) -> None:
    config = GeckoConfig.preset(preset)
    with meta_device():
        model = Gecko(config)
    found = {name: (x.shape, x.dtype, x.device.type) for name, x in model.state_dict().items()}
    assert found == {name: (x.shape, x.dtype, "meta") for name, x in Gecko(config).state_dict().items()}


@pytest.mark.parametrize("fill", ["normal_", "uniform_", "kaiming_uniform_", "trunc_normal_", "zeros_"])
def test_initialisation_returns_the_tensor(fill: str) -> None:
    with meta_device():
        x = torch.empty(3, 2)
        assert getattr(torch.nn.init, fill)(x) is x


def test_real_tensors_are_initialised_after_it() -> None:
    with meta_device():
        Gecko(PRESETS["tiny"])
    assert torch.nn.init.normal_(torch.zeros(100)).count_nonzero() == 100
