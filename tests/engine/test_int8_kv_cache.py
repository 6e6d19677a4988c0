"""An int8 KV cache: texts do not depend on batch, chunks or cached prefixes, and less memory holds as many tokens."""

from collections.abc import Callable

import pytest

from engine import LLM, ConfigError, SamplingParams
from engine.resolved_config import ResolvedConfig
from kernels.cpu import NativeLibrary
from tests.engine.device.test_native_swap import FakeBuild, use_build
from tests.engine.model.drive import make_prompt
from tests.kernels.cpu.conftest import require_library

MakeLLM = Callable[..., LLM]


@pytest.fixture
def library() -> NativeLibrary:
    return require_library()


PROMPTS = [make_prompt(length, length) for length in (1, 17, 64, 300, 300, 90)]
PARAMS = [SamplingParams(temperature=number % 2, seed=number, max_tokens=40, ignore_eos=True) for number in range(6)]


def generate(llm: LLM, indices: list[int]) -> list[list[int]]:
    outputs = llm.generate([PROMPTS[i] for i in indices], [PARAMS[i] for i in indices], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_do_not_depend_on_batch_chunks_or_cached_prefixes(
    make_llm: MakeLLM, library: NativeLibrary, dtype: str
) -> None:
    settings = {"kv_cache_dtype": "int8", "dtype": dtype}
    with make_llm(**settings) as llm:
        together, again = generate(llm, list(range(6))), generate(llm, list(range(6)))
        assert llm.resolved.worker.kv_cache_dtype == "int8"
    with make_llm(**settings, max_num_seqs=2, max_num_batched_tokens=37, enable_prefix_caching=False) as llm:
        alone = [generate(llm, [index])[0] for index in range(6)]
    assert together == again == alone


def test_a_block_takes_little_more_than_a_quarter_of_float32s_memory(
    make_llm: MakeLLM, library: NativeLibrary
) -> None:
    def resolve(name: str) -> ResolvedConfig:
        with make_llm(kv_cache_dtype=name, num_blocks=None, memory_share=0.001, dtype="float32") as llm:
            return llm.resolved

    plain, int8 = resolve("auto"), resolve("int8")
    assert int8.cache.num_blocks > 3 * plain.cache.num_blocks
    assert int8.fingerprint != plain.fingerprint


def test_without_native_ops_it_is_refused(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    use_build(monkeypatch, FakeBuild(None, is_done=True))
    with pytest.raises(ConfigError, match="needs the native ops, which are not available: no compiler"):
        make_llm(kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="not supported by the torch-sdpa ops"):
        make_llm(kv_cache_dtype="int8", attention_backend="sdpa")
