"""One torch thread; a tiny random checkpoint with a tokenizer, made once per session; engines and LLMs over it."""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer

from engine import LLM, EngineConfig
from tests.engine.model.drive import make_transformers_model, save
from tests.engine.tokenizer_folders import make_byte_level_folder
from tests.one_thread import one_thread as one_thread


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes one of each family, of 3 or 4 layers with a byte-level tokenizer of 423 entries; `</s>` ends a text."""

    @cache
    def make(family: str) -> Path:
        folder = make_byte_level_folder(tmp_path_factory.mktemp("checkpoint"))
        tokenizer = RustTokenizer.from_file(str(folder / "tokenizer.json"))
        eos = tokenizer.token_to_id("</s>")
        model = make_transformers_model(family, vocab_size=tokenizer.get_vocab_size(), eos_token_id=eos)
        return save(model, folder)

    return make


@pytest.fixture
def family() -> str:
    """Of `make_config`; tests may have it as a parameter."""
    return "qwen3"


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: Callable[[str], Path]) -> Path:
    return make_checkpoint("qwen3")


@pytest.fixture
def make_config(make_checkpoint: Callable[[str], Path], family: str) -> Callable[..., EngineConfig]:
    """EngineConfig over a tiny checkpoint, small enough to see its limits."""
    checkpoint = make_checkpoint(family)

    def make(**changes: Any) -> EngineConfig:
        settings: dict[str, Any] = {"num_blocks": 400, "max_num_seqs": 32, "num_threads": 1}
        settings["grammar_timeout_s"] = 120.0  # on a busy machine, too
        return EngineConfig(model=str(checkpoint), **(settings | changes))

    return make


@pytest.fixture
def make_llm(make_config: Callable[..., EngineConfig]) -> Callable[..., LLM]:
    return lambda **changes: LLM(**asdict(make_config(**changes)))
