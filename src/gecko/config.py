"""Configuration of a model's architecture, and the presets. It has no settings of training or inference."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from gecko.io.files import parse_object
from gecko.records import Range, build, check, unknown_name

Attention = Literal["sliding_chunk", "chunk", "sliding_window"]
Memory = Literal["adaptive", "linear", "orthogonal", "none"]
CEMASkip = Literal["identity", "learned"]
QueriesAndKeys = Literal["shared", "separate"]
Gate = Literal["attention", "sum", "none"]
Config = TypeVar("Config")

LARGEST = 1 << 24
"""Largest width, chunk or vocabulary: 64 bits hold the bytes of a tensor with any three of them."""
MOST_LAYERS = 10_000
"""Largest number of layers: a block is built in a few milliseconds, even without its weights."""
MODEL_TYPE = "gecko"
"""``model_type`` in a ``config.json``, which transformers reads too."""


def whole(least: int, most: int) -> Range:
    """Return the range of whole numbers in ``least`` … ``most``, for configs that Python code fills in too."""
    start = "must be a whole number of"
    return Range(f"{start} at least {least}", least=least, most=most, limit=f"{start} at most {most:,}", typed=True)


def real(above: float) -> Range:
    """Return the range of numbers above a bound; float32 holds the largest, and its square root and logarithm."""
    wanted = "positive" if above == 0 else f"above {above:g}"
    return Range(f"must be a number, {wanted} and at most 1e+30", above=above, most=1e30, typed=True)


Size = Annotated[int, whole(1, LARGEST)]
Layers = Annotated[int, whole(1, MOST_LAYERS)]
Epsilon = Annotated[float, real(above=1e-30)]
RopeBase = Annotated[float, real(above=1)]


@dataclass(frozen=True)
class Architecture:
    """Base of the configs: presets, and the ``config.json`` of transformers."""

    presets: ClassVar[Mapping[str, Any]]

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return the named architecture, with single fields changed by keyword."""
        return dataclasses.replace(named(cls.presets, name), **changes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return build(cls, fields)

    def for_transformers(self) -> dict[str, Any]:
        """Return the fields of the ``config.json`` that transformers reads, a Gecko's once ``gecko.hf`` is imported."""
        raise NotImplementedError

    @classmethod
    def _from_transformers(cls, fields: dict[str, Any]) -> Self:
        """Take the fields of this class from those of a ``config.json``, which may also have fields of transformers."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.for_transformers(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a ``config.json`` that ``save`` or transformers wrote; one of another model raises ValueError."""
        return parse_object(path, "a model config", cls._from_transformers)


@dataclass(frozen=True)
class GeckoConfig(Architecture):
    """Architecture of a Gecko or of a related model (Megalodon is a preset).

    Widths are totals over heads. ``docs/notation.md`` maps every field to the paper and to the reference release.
    """

    vocab_size: Size
    """Number of token ids."""
    num_layers: Layers
    """Number of blocks; each has a mixer and a feed-forward."""
    model_dim: Size
    """Width of the residual stream (D)."""
    key_dim: Size
    """Width of the shared query / key projection over all heads (Z)."""
    value_dim: Size
    """Width of the values over all heads (V)."""
    num_heads: Size
    """Number of heads of attention and of the working memory (H)."""
    ffn_dim: Size
    """Hidden width of the feed-forward."""
    cema_modes: Size = 16
    """Number of complex modes per channel of the moving average (N)."""
    chunk_size: Size = 2048
    """Tokens in an attention chunk (c); the window of ``sliding_window`` attention."""
    attention: Attention = "sliding_chunk"
    """Keys of a query: two chunks (sliding_chunk), its chunk (chunk), or the last c tokens (sliding_window)."""
    memory: Memory = "adaptive"
    """Memory of what left the window: adaptive (AWM), orthogonal (AWM of a Gekko), linear (Infini-attention), none."""
    memory_key_length: Annotated[float, real(above=0)] = 1.0
    """Initial length of the memory's queries and keys in every head; 1 in the paper.
    With about √key_head_dim, the memory separates keys from the first step (docs/evidence.md)."""
    timestep_betas: tuple[float, float] | None = (0.999, 0.9999)
    """Decays of mean and variance of the timestep norm. None: the cumulative norm of Megalodon."""
    timestep_groups: Annotated[int, whole(0, LARGEST)] = 0
    """Number of groups of features in the timestep norm; each group has its statistics.
    0 becomes the largest divisor of ``model_dim`` up to 64 that leaves 2 features to a group."""
    norm_groups: Size = 1
    """Number of groups in the RMS norm after CEMA and in the layer norm before the feed-forward."""
    norm_eps: Epsilon = 1e-5
    """Added to the variance in norms."""
    norm_affine: bool = True
    """Whether RMS and layer norms have weights."""
    rope_base: RopeBase = 500_000.0
    """Base of the rotary embedding's angles."""
    rope_heads: Annotated[int, Range("must be a whole number in 0..num_heads, or None", typed=True)] | None = None
    """Number of heads whose attention queries and keys are rotated. None: all."""
    cema_skip: CEMASkip = "identity"
    """``identity``: CEMA(x) + x. ``learned``: Megalodon's CEMA(x) + ω x, with γ scaled by 1/√N."""
    swiglu: bool = True
    """Whether the feed-forward is gated."""
    ffn_scale: bool = False
    """Multiply the feed-forward's output by a learned vector."""
    scale_embedding: bool = False
    """Multiply embeddings by √D."""
    tie_embedding: bool = False
    """Whether the head shares the embedding's weight."""
    two_hop_residual: bool = False
    """Add the block's input, not the mixer's output, to the feed-forward's output."""
    queries_and_keys: QueriesAndKeys = "shared"
    """``shared``: scaled and shifted copies of one unit vector per head (the paper). ``separate``: own projections.
    Scores of separate ones are divided by √key_head_dim, and the memory takes them as projected."""
    query_key_bias: bool = True
    """Whether projections of separate queries and keys have a bias."""
    query_key_norm: bool = False
    """With separate queries and keys: an RMS norm per head, with a weight, before attention."""
    key_value_heads: Size | None = None
    """Heads of keys and values, each of which equally many heads of queries share. None: ``num_heads``."""
    value_activation: Literal["silu", "none"] = "silu"
    """Activation of the values."""
    norm: Literal["timestep", "rms"] = "timestep"
    """``timestep``: timestep norms, and layer norms before the feed-forwards. ``rms``: RMS norms of single steps."""
    local_mixing: Literal["cema", "none"] = "cema"
    """What mixes neighbours before queries, keys and gate are projected: CEMA with its RMS norm, or nothing."""
    gate: Gate = "attention"
    """What the gate multiplies: the attention (the release), attention plus memory (the paper's text), or nothing."""
    gate_activation: Literal["silu", "softplus"] = "silu"
    """Activation of the gate; softplus is log₂(1 + 2^x), which is 1 at 0."""
    gate_bias: bool = True
    """Whether the gates' projections have a bias."""
    hidden_branch: bool = True
    """Whether the mixer has the linear branch W_h1."""
    output_norm: bool = False
    """Divide attention plus memory by its root mean square per head, before the gate."""
    memory_gate_channels: Annotated[int, whole(0, LARGEST)] = 0
    """Gates per head between attention and memory, a + g (memory − a) with g = σ(W mx), 0 where the memory is empty.
    With 0 the two are added."""
    memory_factor: Annotated[float, Range("must be a number of at most 1e+30", least=-1e30, most=1e30)] | None = None
    """Initial value of a learned factor of the memory per head. None: no factor."""
    convolution_width: Annotated[int, whole(0, 64)] = 0
    """Taps of a causal convolution of every channel of separate queries, keys and values; 0: none."""
    cema_expansion: bool = False
    """Multiply the input of every CEMA mode by a learned β (the paper; the release has none)."""
    unit_vectors: Literal["head", "whole"] = "head"
    """What has length 1 in the shared vector: each head's part (the release), or the whole (the paper's text)."""
    timestep_eps: Epsilon | None = None
    """Added to the variance in the timestep norm. None: ``norm_eps``."""
    rms_eps: Epsilon | None = None
    """Added to the mean square in RMS norms. None: ``norm_eps``."""
    sinks: Annotated[int, whole(0, LARGEST)] = 0
    """First tokens of a document that stay visible to attention after they have left the window."""
    rope_frequencies: tuple[float, ...] | None = None
    """Angle of one step for every pair of features, in radians, in place of those of ``rope_base``."""
    bfloat16_window: bool = False
    """Store the keys and values of the attention window in bfloat16: half the state, rounded by 2⁻⁹."""

    def __post_init__(self) -> None:
        for name in ("timestep_betas", "rope_frequencies"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.timestep_groups == 0 and isinstance(self.model_dim, int) and self.model_dim > 0:
            groups = max((n for n in range(1, 65) if self.model_dim % n == 0 and 2 * n <= self.model_dim), default=1)
            object.__setattr__(self, "timestep_groups", groups)
        betas = self.timestep_betas
        pair = isinstance(betas, tuple) and len(betas) == 2 and all(_is_real(x) and 0 <= x < 1 for x in betas)
        if betas is not None and not pair:
            raise ValueError(f"timestep_betas must be two decays in [0, 1), or None; got {betas!r}.")
        check(self)
        self._check_groups()
        self._check_heads()

    @property
    def key_head_dim(self) -> int:
        return self.key_dim // self.num_heads

    @property
    def value_head_dim(self) -> int:
        return self.value_dim // self.num_heads

    @property
    def num_rope_heads(self) -> int:
        return self.num_heads if self.rope_heads is None else self.rope_heads

    @property
    def num_key_value_heads(self) -> int:
        return self.num_heads if self.key_value_heads is None else self.key_value_heads

    def refuse(self, fields: Iterable[str], of: str) -> None:
        """Raise ValueError, which names the field, if one of ``fields`` has another value than its default.

        ``of`` says what knows only the default.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in fields:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{of} must have {name}={defaults[name]}; this model has {getattr(self, name)}.")

    def for_transformers(self) -> dict[str, Any]:
        return {"model_type": MODEL_TYPE, "architectures": ["GeckoForCausalLM"], **self.to_dict()}

    @classmethod
    def _from_transformers(cls, fields: dict[str, Any]) -> GeckoConfig:
        if "model_type" not in fields:
            return cls.from_dict(fields)
        if fields["model_type"] != MODEL_TYPE:
            raise ValueError(f"it must be of a {MODEL_TYPE} model, and is of {fields['model_type']!r}.")
        known = {field.name for field in dataclasses.fields(cls)}
        return cls.from_dict({name: value for name, value in fields.items() if name in known})

    def _check_groups(self) -> None:
        """Check that groups and heads divide widths, and that a group has at least 2 features."""
        for whole, part in (("key_dim", "num_heads"), ("value_dim", "num_heads"),
                            ("model_dim", "timestep_groups"), ("model_dim", "norm_groups")):  # fmt: skip
            total, count, grouped = getattr(self, whole), getattr(self, part), part.endswith("_groups")
            # In the cumulative norm, one feature has variance over time.
            alone = grouped and count == total and (part == "norm_groups" or self.timestep_betas is not None)
            if total % count == 0 and not alone:
                continue
            small = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
            divisors = sorted({*small, *(total // n for n in small)})
            fitting = [n for n in divisors if not grouped or 2 * n <= total]
            near = min(fitting or [1], key=lambda n: abs(n - count))
            if alone:
                raise ValueError(
                    f"{part} must leave at least 2 features to a group, which is divided by their deviation; "
                    f"got {total} for {total}. Try {part}={near}."
                )
            raise ValueError(f"{part} must divide {whole}; got {count} and {total}. Try {part}={near}.")

    def _check_heads(self) -> None:
        """Check rotations, the fields that other fields must permit, and heads that share keys and values."""
        heads, own, rotated, size = self.num_heads, self.num_key_value_heads, self.num_rope_heads, self.key_head_dim
        angles = self.rope_frequencies
        fitting = angles is None or (2 * len(angles) == size and all(_is_real(x) and 0 <= x < math.inf for x in angles))
        of_heads = f"must be a whole number in 0..num_heads={heads}, or None; got {self.rope_heads!r}."
        _must(0 <= rotated <= heads, f"rope_heads {of_heads}")
        _must(not rotated or size % 2 == 0, "rotary embedding turns pairs of features, so key_dim / num_heads must be "
              f"even; got {size}. Change key_dim, or set rope_heads=0.")  # fmt: skip
        _must(fitting, f"rope_frequencies must be {size // 2} angles, one for a pair of features; "
              f"got {len(angles or ())}: {(angles or ())[:3]!r} …")  # fmt: skip
        _must(heads % own == 0, f"key_value_heads must divide num_heads; got {own} and {heads}. Try {heads}.")
        for setting, fields in _WITHOUT.items():
            name, value = setting.split("=")
            if getattr(self, name) == value:
                self.refuse(fields, setting)
        width, gates = self.value_head_dim, self.memory_gate_channels
        divide = f"memory_gate_channels must divide value_dim / num_heads={width}; got {gates}."
        _must(not gates or width % gates == 0, divide)
        all_or_none = f"key_value_heads={own} of {heads} heads must have rope_heads None or 0; got {self.rope_heads}."
        _must(own == heads or rotated in (0, heads), all_or_none)
        _must(self.sinks <= self.chunk_size, f"sinks must be at most chunk_size={self.chunk_size}; got {self.sinks}.")


def _must(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


_WITHOUT = {
    "queries_and_keys=shared": ("query_key_bias", "query_key_norm", "key_value_heads", "convolution_width"),
    "queries_and_keys=separate": ("memory_key_length", "unit_vectors"),
    "memory=none": ("memory_gate_channels", "memory_factor"),
    "local_mixing=none": ("cema_expansion",),
    "gate=none": ("gate_activation", "gate_bias"),
}
"""Fields that must have their defaults with a setting."""

_LATER = dropwhile(lambda field: field.name != "queries_and_keys", dataclasses.fields(GeckoConfig))
PAPER: dict[str, Any] = {field.name: field.default for field in _LATER}
"""Fields of Llamas and of later designs, with the values that make the paper's model."""


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def named(presets: Mapping[str, Config], name: str) -> Config:
    """Return the preset of a name; raise ValueError with the nearest name if it is unknown."""
    if name not in presets:
        raise ValueError(unknown_name("preset", name, presets))
    return presets[name]


_GECKO_7B = GeckoConfig(
    vocab_size=32_000, num_layers=32, model_dim=4096, key_dim=1024, value_dim=8192, num_heads=4, ffn_dim=8192,
)  # fmt: skip

_MEGALODON: dict[str, Any] = {
    "swiglu": False, "rope_base": 100_000.0, "attention": "chunk", "memory": "none", "timestep_betas": None,
    "cema_skip": "learned", "two_hop_residual": True,
}  # fmt: skip
_MEGALODON_TINY = GeckoConfig(
    vocab_size=264, num_layers=4, model_dim=128, key_dim=64, value_dim=256, num_heads=2, ffn_dim=384,
    chunk_size=128, timestep_groups=4, **_MEGALODON,
)  # fmt: skip
_MEGALODON_7B = dataclasses.replace(_GECKO_7B, ffn_dim=11_264, **_MEGALODON)

_GEKKO: dict[str, Any] = {
    "vocab_size": 32_000, "chunk_size": 4096, "rms_eps": 1e-6, "queries_and_keys": "separate", "query_key_bias": False,
    "query_key_norm": True, "local_mixing": "none", "convolution_width": 4, "gate": "sum",
    "gate_activation": "softplus", "gate_bias": False, "hidden_branch": False, "output_norm": True,
}  # fmt: skip
"""The authors' later design. Its release names no vocabulary."""

# Of the 256 features of a head, the first 128 are rotated.
_HALF_ROTATED = (*(500_000.0 ** (-i / 64) for i in range(64)), *(0.0,) * 64)

PRESETS: dict[str, GeckoConfig] = {
    "gecko-7b": _GECKO_7B,
    # The paper gives D, the layers and the vocabulary, and points to OLMo-1B, which has 16 heads and a feed-forward of
    # 8,192. Z, V, heads, feed-forward and groups are ours: with 8,192 the model would have 1.50 B parameters.
    "gecko-1b": GeckoConfig(
        vocab_size=50_304, num_layers=16, model_dim=2048, key_dim=512, value_dim=4096, num_heads=2, ffn_dim=6144,
    ),
    "gecko-125m": GeckoConfig(
        vocab_size=50_304, num_layers=12, model_dim=768, key_dim=384, value_dim=1536, num_heads=4, ffn_dim=1152,
        chunk_size=512, timestep_groups=24, tie_embedding=True,
    ),
    "gecko-15m": GeckoConfig(
        vocab_size=264, num_layers=8, model_dim=384, key_dim=192, value_dim=768, num_heads=4, ffn_dim=768,
        chunk_size=256, timestep_groups=12,
    ),
    "gecko-4m": GeckoConfig(
        vocab_size=264, num_layers=4, model_dim=256, key_dim=128, value_dim=512, num_heads=4, ffn_dim=512,
        chunk_size=64, timestep_groups=8,
    ),
    "tiny": GeckoConfig(
        vocab_size=264, num_layers=4, model_dim=128, key_dim=64, value_dim=256, num_heads=2, ffn_dim=256,
        chunk_size=64, timestep_groups=4,
    ),
    "gekko-0.9b": GeckoConfig(
        num_layers=28, model_dim=1536, key_dim=2048, value_dim=2048, num_heads=8, key_value_heads=4, ffn_dim=4096,
        timestep_groups=24, norm_groups=2, rope_frequencies=_HALF_ROTATED, **_GEKKO,
    ),
    "gekko-4b": GeckoConfig(
        num_layers=36, model_dim=2560, key_dim=4096, value_dim=4096, num_heads=32, key_value_heads=8, ffn_dim=9216,
        timestep_groups=40, norm_groups=2, **_GEKKO,
    ),
    "gekko-7.1b": GeckoConfig(
        num_layers=32, model_dim=4096, key_dim=1024, value_dim=8192, num_heads=4, ffn_dim=8192, norm_groups=4, **_GEKKO,
    ),
    "gekko-tiny": GeckoConfig(
        num_layers=4, model_dim=128, key_dim=64, value_dim=256, num_heads=2, key_value_heads=1, ffn_dim=352,
        timestep_groups=4, **{**_GEKKO, "vocab_size": 264, "chunk_size": 64},
    ),
    "megalodon-tiny": dataclasses.replace(_MEGALODON_TINY, swiglu=True, ffn_dim=256),
    "megalodon-tiny-ungated": _MEGALODON_TINY,
    # The release's mega7.3B, which has SwiGLU as the paper says, and its mega7.1B.
    "megalodon-7b": dataclasses.replace(_MEGALODON_7B, swiglu=True, ffn_dim=8192),
    "megalodon-7b-ungated": _MEGALODON_7B,
}  # fmt: skip
GeckoConfig.presets = PRESETS
