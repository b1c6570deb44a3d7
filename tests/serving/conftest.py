"""A small model, and real servers of it on the loopback interface."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from serving.sites import Site, serving
from serving.templates import SPECIALS

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


@pytest.fixture(scope="session")
def shared(
    model: gecko.Gecko, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Site]]:
    """Return a function that returns a server with its own options, one for all tests that ask for the same."""
    with ExitStack() as stack:

        @cache
        def get(template: str | None = None, tokenizer: Tokenizer = tokenizer, **options: Any) -> Site:
            folder = tmp_path_factory.mktemp("model")
            if template is not None:
                added = {str(index): {"content": name, "special": True} for name, index in SPECIALS.items()}
                (folder / "chat_template.jinja").write_text(template)
                (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
            return stack.enter_context(serving(model, tokenizer, folder, **options))

        yield get


@pytest.fixture(scope="session")
def site(shared: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Return the server that most tests share."""
    limits = Limits(rows=4, queue=40, body_bytes=200_000, prompt_tokens=50_000)
    site = shared(limits=limits, prefix_cache_bytes=1 << 20, states=tmp_path_factory.mktemp("states"))
    yield site
    site.wait_until_idle()


@pytest.fixture(scope="session")
def keyed(shared: StartServer) -> Site:
    """Return a server that wants a key."""
    limits = Limits(body_bytes=200_000, prompt_tokens=200_000)
    return shared(api_key="secret", allowed_hosts=("app.example",), limits=limits)


@pytest.fixture(scope="session")
def hasty(shared: StartServer) -> Site:
    """Return a server that waits for a body, or for a client that reads, for a moment only."""
    return shared(api_key="secret", limits=Limits(body_seconds=0.3))


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a decoding step take 10 ms, so that a text does not end before the test has looked at it."""
    step = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda *args: time.sleep(0.01) or step(*args))
