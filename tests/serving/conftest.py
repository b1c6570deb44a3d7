"""A small model, and real servers of it on the loopback interface."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from serving.sites import Site, serving

import gecko
from gecko.data import Tokenizer, load_tokenizer
from gecko.inference.decoder import Decoder
from gecko.serving.options import Limits

CONFIG = gecko.GeckoConfig(
    vocab_size=264, num_layers=2, model_dim=32, key_dim=16, value_dim=32, num_heads=2, ffn_dim=32,
    cema_modes=4, chunk_size=8, timestep_groups=4,
)  # fmt: skip


@pytest.fixture(scope="session")
def model() -> gecko.Gecko:
    """Return a model that writes letters only, so that texts never end early and do not depend on decoding."""
    torch.manual_seed(0)
    model = gecko.Gecko(CONFIG)
    with torch.no_grad():
        model.final_norm.bias.fill_(1)
        model.head.weight[:97], model.head.weight[123:] = -1, -1
        model.head.weight[97:123] *= 4
    return model


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


@pytest.fixture(scope="session")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer whose words start with a space, as those of SentencePiece do."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary = {"</s>": 0, "<unk>": 1, "▁": 2, "a": 3, "the": 4, "▁the": 5}
    library = Library(models.Unigram([(text, -float(index)) for text, index in vocabulary.items()], unk_id=1))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    library.add_special_tokens(["</s>"])
    folder = tmp_path_factory.mktemp("spaced")
    library.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder))


StartServer = Callable[..., Site]


@pytest.fixture
def start(model: gecko.Gecko, tokenizer: Tokenizer, tmp_path: Path) -> Iterator[StartServer]:
    """Return a function that starts a server with its own options."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(model, tokenizer, tmp_path, **options))


@pytest.fixture(scope="module")
def site(model: gecko.Gecko, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Return the server that most tests share."""
    limits = Limits(rows=4, queue=40, body_bytes=200_000, prompt_tokens=50_000)
    states = tmp_path_factory.mktemp("states")
    with serving(model, tokenizer, states, limits=limits, prefix_cache_bytes=1 << 20, states=states) as site:
        yield site
        site.wait_until_idle()


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a decoding step take 10 ms, so that a text does not end before the test has looked at it."""
    step = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda *args: time.sleep(0.01) or step(*args))
