"""The reading state is immutable; saving, loading, cutting into rows and stacking do not change it."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cases
from support.cases import CHUNK, tokens
from support.model_calls import variants

import gecko
from gecko.io.model_folder import load_tensors, save_tensors


def reading(variant: str = "gecko", dtype: torch.dtype = torch.float32, batch: int = 2):
    """Return a model, and its state after 29 tokens, of which the last 18 are one document."""
    model = cases.model(variant, dtype)
    with torch.no_grad():
        return model, model(tokens(batch, 29), torch.arange(29).ge(11).long().expand(batch, -1))[1]


def assert_equal(one: gecko.GeckoState, other: gecko.GeckoState) -> None:
    assert (one.config, one.model) == (other.config, other.model)
    assert one.tensors().keys() == other.tensors().keys()
    for name, tensor in one.tensors().items():
        assert tensor.dtype == other.tensors()[name].dtype and torch.equal(tensor, other.tensors()[name]), name


@variants
@pytest.mark.parametrize(("dtype", "batch"), [(torch.float32, 1), (torch.float64, 2)], ids=["float32", "float64"])
def test_saved_state_goes_on_where_it_stood(variant, dtype, batch, tmp_path):
    model, state = reading(variant, dtype, batch)
    state.save(tmp_path / "book.state")
    loaded = gecko.GeckoState.load(tmp_path / "book.state")
    assert_equal(loaded, state)
    with torch.no_grad():
        assert torch.equal(model(tokens(batch, 30), None, loaded)[0], model(tokens(batch, 30), None, state)[0])


EXACT = ("position", "document_start", "segment_id", "count", "mean", "variance", "normaliser", "weight")
"""Last names of the tensors that a compact file must not round: clocks, counts, statistics, log sums."""


@variants
def test_compact_file_rounds_to_bfloat16_what_may_be_rounded_and_nothing_else(variant, tmp_path):
    model, state = reading(variant)
    state.save(tmp_path / "wide")
    state.save(tmp_path / "compact", compact=True)
    loaded = gecko.GeckoState.load(tmp_path / "compact")
    for name, tensor in state.tensors().items():
        exact = name.split(".")[-1] in EXACT or not tensor.is_floating_point()
        expected = tensor if exact else tensor.bfloat16().float()
        assert torch.equal(loaded.tensors()[name], expected), name
        assert loaded.tensors()[name].dtype == tensor.dtype
    assert (tmp_path / "compact").stat().st_size < 0.75 * (tmp_path / "wide").stat().st_size
    with torch.no_grad():
        near, exact = (model(tokens(2, 30), None, x)[0] for x in (loaded, state))
    assert 0 < (near - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize("compact", [False, True])
def test_equal_states_are_equal_files(compact, tmp_path):
    """A file of a loaded state too: to be compact twice loses nothing."""
    state = reading()[1]
    for name in range(5):
        state.save(tmp_path / str(name), compact=compact)
        state = gecko.GeckoState.load(tmp_path / "0")
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
def test_compact_keeps_the_dtype_that_each_part_has_in_memory(dtype, tmp_path):
    """Here the windows have another dtype than the rest of the state."""
    _, state = reading(dtype=torch.float64)
    mixers = [dataclasses.replace(x, attention=x.attention.map(lambda x: x.to(dtype))) for x in state.mixers]
    mixed = dataclasses.replace(state, mixers=tuple(mixers))
    mixed.save(tmp_path / "state", compact=True)
    loaded = gecko.GeckoState.load(tmp_path / "state")
    assert [x.dtype for x in loaded.tensors().values()] == [x.dtype for x in mixed.tensors().values()]
    assert torch.equal(loaded.mixers[0].attention.keys, mixers[0].attention.keys.bfloat16().to(dtype))


def test_state_survives_its_model_s_folder(tmp_path):
    """A state fits the same model after saving and loading, and no other model."""
    model, state = reading()
    model.save(tmp_path / "model")
    state.save(tmp_path / "state")
    loaded = gecko.load(tmp_path / "model")
    with torch.no_grad():
        loaded(tokens(2, 3), None, gecko.GeckoState.load(tmp_path / "state"))
        loaded.blocks[1].mixer.to_output.weight[0, 0] += 1
        with pytest.raises(ValueError, match="made by other weights of the same config"):
            loaded(tokens(2, 3), None, state)


@settings(max_examples=10)
@given(rows=st.lists(st.integers(0, 3), max_size=6))
def test_rows_and_stack_are_inverse(rows):
    model, state = reading()
    with torch.no_grad():
        state = gecko.GeckoState.stack([state, model(tokens(2, 5))[1]])
    assert state.batch_size == 4 and state.position == [29, 29, 5, 5]
    chosen = state.rows(rows)
    assert chosen.position == [state.position[row] for row in rows]
    assert_equal(gecko.GeckoState.stack([state.rows([row]) for row in rows] + [state.rows([])]), chosen)
    with pytest.raises(ValueError, match="must be at least one; got none"):
        gecko.GeckoState.stack([])


def test_size_is_what_the_config_says():
    """Float32, per layer: window, memory with two summaries, CEMA, norm. Once per model: norm and clock. A state on a
    device has its clock on the host."""
    model, state = reading()
    c = model.config
    heads, key, value, norm = c.num_heads, c.key_head_dim, c.value_head_dim, 2 * c.timestep_groups
    largest_memory = heads * (3 * key * value + 2 * key * key + 3 * key)
    per_layer = heads * 2 * CHUNK * (key + value) + largest_memory + 2 * c.model_dim * c.cema_modes + norm
    assert state.num_bytes <= 2 * (4 * (c.num_layers * per_layer + norm) + 200)
    assert state.rows([0]).num_bytes * 2 == state.num_bytes
    moved = state.to("meta")
    assert moved.position == state.position
    assert all(x.device.type == "meta" for name, x in moved.tensors().items() if not name.startswith("clock."))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "book.state"
    reading()[1].save(path)
    return path.read_bytes()


@settings(max_examples=60)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(saved, tmp_path_factory, place, bit):
    path = tmp_path_factory.getbasetemp() / "flipped.state"
    data = bytearray(saved)
    data[int(place * len(data))] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"flipped.state"):
        gecko.GeckoState.load(path)


def test_files_that_hold_no_state(tmp_path):
    model, state = reading()
    model.save(tmp_path)
    save_tensors(tmp_path / "tensors", {"x": torch.zeros(3)}, {})
    state.save(tmp_path / "state")
    tensors = {name: x for name, x in state.tensors().items() if "memory" not in name}
    save_tensors(tmp_path / "old", tensors, load_tensors(tmp_path / "state")[1])
    for name, error, message in (
        ("book.state", FileNotFoundError, r"book.state must be a file written by gecko; there is none"),
        ("model.safetensors", ValueError, r"must hold a reading state \(gecko-state-1\).*gecko-model-1"),
        ("tensors", ValueError, r"must hold a reading state"),
        ("old", ValueError, r"tensors of its config; mixers.0.memory.\w+ must be float32 of .*, and is absent"),
    ):
        with pytest.raises(error, match=message):
            gecko.GeckoState.load(tmp_path / name)
