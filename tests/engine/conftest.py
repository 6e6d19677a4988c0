"""One torch thread; a tiny random checkpoint with a tokenizer, made once per session; engines and LLMs over it."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer

from engine import LLM, Engine, EngineConfig
from tests.engine.mixed_requests import ROOMY, Completion, make_mixed_requests, run_mixed
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
    """Of `make_config` and `mixed_answers`; tests may have it as a parameter."""
    return "qwen3"


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: Callable[[str], Path]) -> Path:
    return make_checkpoint("qwen3")


def make_tiny_config(checkpoint: Path, **changes: Any) -> EngineConfig:
    """EngineConfig over a tiny checkpoint, small enough to see its limits."""
    settings: dict[str, Any] = {"num_blocks": 400, "max_num_seqs": 32, "num_threads": 1}
    settings["grammar_timeout_s"] = 120.0  # on a busy machine, too
    return EngineConfig(model=str(checkpoint), **(settings | changes))


@pytest.fixture
def make_config(make_checkpoint: Callable[[str], Path], family: str) -> Callable[..., EngineConfig]:
    return partial(make_tiny_config, make_checkpoint(family))


@pytest.fixture
def make_llm(make_config: Callable[..., EngineConfig]) -> Callable[..., LLM]:
    return lambda **changes: LLM(**asdict(make_config(**changes)))


@pytest.fixture(scope="session")
def answer_mixed(make_checkpoint: Callable[[str], Path]) -> Callable[[str], list[list[Completion]]]:
    async def answer(family: str) -> list[list[Completion]]:
        async with Engine(make_tiny_config(make_checkpoint(family), **ROOMY)) as engine:
            found = await run_mixed(engine, make_mixed_requests())
            assert engine.stats().num_preemptions == 0
            return found

    return cache(lambda family: asyncio.run(answer(family)))


@pytest.fixture
def mixed_answers(answer_mixed: Callable[[str], list[list[Completion]]], family: str) -> list[list[Completion]]:
    """What the mixed requests get from one core in this process that drafts nothing and is never interrupted."""
    return answer_mixed(family)
