"""The config refuses contradictions, round-trips through JSON, and has presets."""

import dataclasses
import json
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import SMALL, VARIANTS

from gecko import Gecko, GeckoConfig
from gecko.config import PRESETS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a whole number of at least 1; got 0"),
        ({"num_layers": 10**9}, "num_layers must be a whole number of at most 10,000; got 1000000000"),
        ({"model_dim": 2 * 8_388_593}, "timestep_groups must divide model_dim; got 4 and 16777186. Try .*=2"),
        *(
            ({name: 10**24}, f"{name} must be a whole number of at most 16,777,216; got 1000000000000000000000000")
            for name in ("vocab_size", "model_dim", "key_dim", "ffn_dim", "cema_modes", "chunk_size", "norm_groups")
        ),
        ({"model_dim": -32}, "model_dim must be a whole number of at least 1; got -32"),
        ({"chunk_size": 8.0}, "chunk_size must be a whole number of at least 1; got 8.0"),
        ({"vocab_size": "64"}, "vocab_size must be a whole number of at least 1; got '64'"),
        ({"cema_modes": True}, "cema_modes must be a whole number of at least 1; got True"),
        ({"attention": "sliding"}, "attention must be one of .*got 'sliding'. Did you mean 'sliding_chunk'"),
        (
            {"memory": "adaptve"},
            "memory must be one of adaptive, linear, none, orthogonal; got 'adaptve'. Did you mean 'adaptive'",
        ),
        ({"cema_skip": None}, "cema_skip must be one of identity, learned; got 'None'"),
        ({"num_heads": 5}, "num_heads must divide key_dim; got 5 and 16. Try num_heads=4"),
        ({"value_dim": 25}, "num_heads must divide value_dim; got 2 and 25. Try num_heads=1"),
        ({"timestep_groups": 5}, "timestep_groups must divide model_dim; got 5 and 32. Try timestep_groups=4"),
        ({"norm_groups": 3}, "norm_groups must divide model_dim; got 3 and 32"),
        ({"norm_groups": 32}, "norm_groups must leave at least 2 features to a group.* for 32. Try norm_groups=16"),
        ({"timestep_groups": 32}, "timestep_groups must leave at least 2 features to a group"),
        ({"rope_heads": 3}, "rope_heads must be a whole number in 0..num_heads=2, or None; got 3"),
        ({"rope_heads": -1}, "rope_heads must be a whole number in 0..num_heads=2, or None; got -1"),
        ({"rope_heads": 1.5}, "rope_heads must be a whole number .* got 1.5"),
        ({"rope_heads": True}, "rope_heads must be a whole number .* got True"),
        ({"key_dim": 6}, r"key_dim / num_heads must be even; got 3. Change key_dim, or set rope_heads=0"),
        ({"timestep_betas": (0.9, 1.0)}, r"timestep_betas must be two decays in \[0, 1\), or None; got \(0.9, 1.0\)"),
        ({"timestep_betas": (0.9,)}, "timestep_betas must be two decays"),
        ({"timestep_betas": ("0.9", 0.9)}, "timestep_betas must be two decays"),
        ({"timestep_betas": 0.9}, "timestep_betas must be two decays"),
        ({"memory_key_length": 0.0}, "memory_key_length must be a number, positive and at most 1e\\+30; got 0.0"),
        ({"memory_key_length": math.inf}, "memory_key_length must be a number, positive and at most 1e\\+30; got inf"),
        ({"norm_eps": 0.0}, "norm_eps must be a number, above 1e-30 and at most 1e\\+30; got 0.0"),
        ({"norm_eps": float("nan")}, "norm_eps must be a number, above 1e-30 and at most 1e\\+30; got nan"),
        ({"norm_eps": math.inf}, "norm_eps must be a number, above 1e-30 and at most 1e\\+30; got inf"),
        ({"norm_eps": "1e-5"}, "norm_eps must be a number, above 1e-30 and at most 1e\\+30; got '1e-5'"),
        ({"rope_base": 1.0}, "rope_base must be a number, above 1 and at most 1e\\+30; got 1.0"),
        *(
            ({name: value}, f"{name} must be a number, .* at most")
            for name in ("memory_key_length", "norm_eps", "rope_base")
            for value in (2**2000, 1e31, -1.0)
        ),
        ({"norm_eps": 1e-320}, "norm_eps must be a number, above 1e-30"),
        ({"timestep_betas": (0.9, 10**400)}, "timestep_betas must be two decays"),
        ({"rope_heads": 10**30}, "rope_heads must be a whole number .* got 10000"),
        ({"swiglu": "false"}, "swiglu must be true or false; got 'false'"),
        ({"tie_embedding": 1}, "tie_embedding must be true or false; got 1"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_one_feature_has_a_deviation_over_time_and_odd_heads_may_go_unrotated():
    assert dataclasses.replace(SMALL, timestep_groups=32, timestep_betas=None).timestep_groups == SMALL.model_dim
    assert dataclasses.replace(SMALL, key_dim=6, rope_heads=0).key_head_dim == 3


@pytest.mark.parametrize("config", [*PRESETS.values(), *(dataclasses.replace(SMALL, **v) for v in VARIANTS.values())])
def test_json_round_trip(config, tmp_path):
    config.save(tmp_path / "config.json")
    assert GeckoConfig.load(tmp_path / "config.json") == config
    assert GeckoConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(betas=st.none() | st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)), eps=st.floats(1e-12, 1.0))
def test_numbers_survive_json_exactly(betas, eps):
    config = dataclasses.replace(SMALL, timestep_betas=betas, norm_eps=eps)
    assert GeckoConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_presets():
    assert GeckoConfig.preset("tiny", chunk_size=32) == dataclasses.replace(PRESETS["tiny"], chunk_size=32)
    large = GeckoConfig.preset("gecko-7b")
    assert (large.key_head_dim, large.value_head_dim, large.num_rope_heads) == (256, 2048, 4)
    for size in ("7b", "tiny"):
        megalodon = GeckoConfig.preset(f"megalodon-{size}")
        ungated = GeckoConfig.preset(f"megalodon-{size}-ungated")
        assert (megalodon.memory, megalodon.swiglu, ungated.swiglu) == ("none", True, False)
        assert dataclasses.replace(megalodon, swiglu=False, ffn_dim=ungated.ffn_dim) == ungated
    assert GeckoConfig.preset("megalodon-7b").chunk_size == 2048
    for config in PRESETS.values():
        assert config.key_head_dim >= 32


@pytest.mark.parametrize(
    ("preset", "low", "high"),
    [
        ("gecko-7b", 7_385_817_088, 7_385_817_088),
        ("gecko-1b", 1.25e9, 1.40e9),
        ("gecko-125m", 1.1e8, 1.5e8),
        ("gecko-15m", 1.2e7, 1.8e7),
        ("gecko-4m", 3_756_032, 3_756_032),
        ("tiny", 0.8e6, 1.2e6),
        ("megalodon-7b", 7.3e9, 7.4e9),
        ("megalodon-7b-ungated", 7.1e9, 7.2e9),
    ],
)
def test_parameter_count(preset, low, high):
    with torch.device("meta"):
        model = Gecko(GeckoConfig.preset(preset))
    assert low <= sum(parameter.numel() for parameter in model.parameters()) <= high


def test_configs_are_values():
    assert hash(SMALL) == hash(dataclasses.replace(SMALL))
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.chunk_size = 9


@pytest.mark.parametrize("width", [2, 4, 6, 16, 24, 32, 64, 96, 100, 126, 128, 130, 1000, 4096])
@pytest.mark.parametrize("groups", [64, 7, 1000, None])
def test_groups_that_are_left_out_or_proposed_fit_every_width(width: int, groups: int | None) -> None:
    sizes = {"vocab_size": 9, "num_layers": 1, "model_dim": width, "key_dim": 4, "value_dim": 4, "num_heads": 2}
    given = {} if groups is None else {"timestep_groups": groups}
    try:
        config = GeckoConfig(**sizes, ffn_dim=4, **given)
    except ValueError as error:
        assert groups is not None
        proposed = int(re.findall(r"Try timestep_groups=(\d+)", str(error))[0])
        config = GeckoConfig(**sizes, ffn_dim=4, timestep_groups=proposed)
    assert width % config.timestep_groups == 0 and 2 * config.timestep_groups <= width
    assert groups is not None or width < 4096 or config.timestep_groups == 64
    assert GeckoConfig.from_dict(config.to_dict()) == config
