"""Models with state layers through the engine: texts, prefix hits and refusals."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine import LLM, Engine, EngineConfig, RequestOutput, SamplingParams
from engine.errors import ConfigError
from engine.spec.draft_planner import DraftPlanner
from tests.engine.mixed_requests import TIGHT, Oracle, make_mixed_requests, run_mixed
from tests.engine.model.drive import make_prompt, make_transformers_model, save
from tests.engine.tokenizer_folders import make_byte_level_folder

END = 0  # ends the turns of a chat
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "memory_share": 0.01}
LOOKUP = {"method": ["ngram", "suffix"], "prompt_lookup_min": 1, "adaptive": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("qwen3_5", tmp_path_factory.mktemp("hybrid"))


def make_folder(family: str, folder: Path) -> Path:
    model = make_transformers_model(family, max_position_embeddings=8192, eos_token_id=END)
    model.generation_config.eos_token_id = END
    return save(model, folder)


def read_tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(part.token_ids) for part in output.outputs] for output in outputs]


@pytest.mark.soak  # the mixed requests below do the same with one family
@pytest.mark.parametrize("family", ["granite4h", "qwen3_5", "qwen3_next", "lfm2_moe"])
def test_texts_do_not_depend_on_batch_chunks_cache_preemption_or_drafts(family: str, tmp_path: Path) -> None:
    folder = make_folder(family, tmp_path)
    prompts = [make_prompt(length) for length in (3, 16, 70, 75, 100)]
    params = [
        SamplingParams(temperature=n % 2, seed=n, n=1 + n % 2, max_tokens=40, ignore_eos=True)
        for n in range(5)
    ]
    plain = SETTINGS | {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_model_len": 160}
    with LLM(str(folder), num_blocks=60, **plain) as llm:
        alone = [llm.generate(*each, use_tqdm=False)[0] for each in zip(prompts, params, strict=True)]
    small = SETTINGS | {"max_num_seqs": 4, "max_num_batched_tokens": 30, "max_model_len": 160}
    with LLM(str(folder), num_blocks=16, **small) as llm:
        runs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        assert llm.stats().num_preemptions > 0
        assert llm.stats().prefix_cache_hits > 0
    with LLM(str(folder), num_blocks=16, speculative_config=LOOKUP, **small) as llm:
        runs += [llm.generate(prompts, params, use_tqdm=False) for _ in range(3)]
        counts = llm.stats().drafts.values()  # "suffix" knows the texts from the second run on
        num_accepted = sum(sum(each.accepted_per_position) for each in counts)
        assert 50 < num_accepted < sum(each.num_draft_tokens for each in counts)
    assert [read_tokens(run) for run in runs] == [read_tokens(alone)] * 5


async def test_mixed_requests_do_not_depend_on_preemption_masks_resuming_or_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grammars, whose rows wait for masks, `n` > 1, penalties, priorities; then all go on from half of their tokens."""
    folder = make_byte_level_folder(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size, eos = tokenizer.get_vocab_size(), tokenizer.token_to_id("</s>")
    save(make_transformers_model("qwen3_5_moe", vocab_size=size, eos_token_id=eos), folder)
    requests = make_mixed_requests(num_requests=26)
    settings: dict[str, Any] = {"num_threads": 1, "memory_share": 0.01, "grammar_timeout_s": 120.0}
    plain = settings | {"num_blocks": 800, "max_num_seqs": 8, "enable_prefix_caching": False}
    async with Engine(EngineConfig(str(folder), **plain)) as engine:
        expected = await run_mixed(engine, requests)
    async with Engine(EngineConfig(str(folder), **settings | TIGHT)) as engine:
        assert await run_mixed(engine, requests) == expected
        stats = engine.stats()
        assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0
        assert stats.num_free_blocks == stats.num_blocks
        halves = [[each.token_ids[: len(each.token_ids) // 2] for each in found] for found in expected]
        rest = await run_mixed(engine, requests, halves)
    for completions, found, half in zip(expected, rest, halves, strict=True):
        tokens = [start + each.token_ids for start, each in zip(half, found, strict=True)]
        assert tokens == [each.token_ids for each in completions]
    oracle = Oracle(expected)
    monkeypatch.setattr("engine.engine_core.DraftPlanner", partial(DraftPlanner, proposers=[oracle]))
    drafting = settings | TIGHT | {"speculative_config": LOOKUP}
    async with Engine(EngineConfig(str(folder), **drafting)) as engine:
        assert await run_mixed(engine, requests) == expected
        counts = engine.stats().drafts
    # Forced texts come from the grammars.
    assert {name for name, each in counts.items() if any(each.accepted_per_position)} == {"oracle", "forced"}


def test_drafts_of_a_model_change_no_text(folder: Path, tmp_path: Path) -> None:
    drafter = save(make_transformers_model("qwen3"), tmp_path)
    prompts = [make_prompt(length) for length in (3, 40, 70)]
    params = [SamplingParams(temperature=n % 2, seed=n, max_tokens=60, ignore_eos=True) for n in range(3)]
    config = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 3, "adaptive": False}
    found = []
    for drafts in (None, config):
        with LLM(str(folder), num_blocks=60, speculative_config=drafts, **SETTINGS) as llm:
            found.append(read_tokens(llm.generate(prompts, params, use_tqdm=False)))
            num_drafted = [each.num_draft_tokens for each in llm.stats().drafts.values()]
    assert found[0] == found[1]
    assert num_drafted[0] > 100


async def test_an_aborted_request_leaves_its_slots(folder: Path) -> None:
    params = SamplingParams(max_tokens=500, ignore_eos=True, seed=1)
    async with Engine(EngineConfig(str(folder), num_blocks=100, max_model_len=1000, **SETTINGS)) as engine:
        for number in range(3):
            stream = engine.generate(make_prompt(40, number), params, str(number))
            async for output in stream:
                if len(output.outputs[0].token_ids) > 30:
                    break
            await stream.aclose()
        prompt = make_prompt(40, 2)
        again = [output async for output in engine.generate(prompt, params, "again")][-1]
        assert again.num_cached_tokens == 32


class Chat:
    """Turns of a chat whose answers have a fixed length."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.tokens: list[int] = []

    def ask(self, message: list[int], num_tokens: int = 90) -> int:
        """Add a message and its answer. Returns how many of the earlier tokens were computed again."""
        old = len(self.tokens)
        self.tokens += [*message, END]
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        (output,) = self.llm.generate([self.tokens], params, use_tqdm=False)
        assert output.num_cached_tokens is not None
        self.tokens += [*output.outputs[0].token_ids, END]
        return old - output.num_cached_tokens


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), num_blocks=1000, max_model_len=8192, **SETTINGS) as llm:
        yield llm


def test_second_turn_of_a_chat_computes_few_tokens_again(llm: LLM) -> None:
    chat = Chat(llm)
    assert chat.ask(make_prompt(4000)) == 0
    assert [chat.ask(make_prompt(20 + turn, turn)) <= 18 for turn in range(1, 5)] == [True] * 4


def test_completions_of_one_prompt_compute_it_once(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=1, max_tokens=4, ignore_eos=True)
    before = llm.stats().num_step_tokens
    llm.generate([make_prompt(900)], params, use_tqdm=False)
    assert llm.stats().num_step_tokens - before < 1000


def test_other_chats_share_the_system_message(llm: LLM) -> None:
    system = [*make_prompt(200), END]
    first, second = Chat(llm), Chat(llm)
    first.ask([*system, *make_prompt(300, 1)])
    second.tokens = list(system)
    assert second.ask(make_prompt(300, 2)) < 16


def test_an_answer_that_was_edited_continues_from_the_end_of_the_question(llm: LLM) -> None:
    chat = Chat(llm)
    chat.ask(make_prompt(300))
    chat.tokens = [*chat.tokens[:301], *make_prompt(50, 7), END]
    assert chat.ask(make_prompt(9, 8)) <= 51 + 16


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size.*state per request"),
        ({"kv_offload_gb": 1e-5}, "kv_offload_gb: 10737 bytes cannot hold the state"),
    ],
    ids=str,
)
def test_settings_without_support_or_room_for_states_are_refused(
    settings: dict[str, Any], reason: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(str(folder), **SETTINGS | settings)


def test_a_draft_model_with_states_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="state per request, which a draft model cannot have"):
        LLM(str(folder), speculative_config={"method": "draft_model", "model": str(folder)}, **SETTINGS)
