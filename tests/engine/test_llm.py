"""LLM: what its two calls take, hand on and refuse. Chat messages: parts become one text."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM, BeamSearchParams, EngineSleeping, InvalidRequest, SamplingParams
from engine.input.chat_messages import read_messages
from engine.llm_inputs import list_conversations, list_prompts

GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}. {% endfor %}{{ mood }}"
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% if add_generation_prompt %}go{% endif %}"
)
CHAT = [{"role": "user", "content": "hello " * 40}]


@pytest.fixture(scope="module")
def llm(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(str(folder), num_blocks=400, max_num_seqs=32, num_threads=1, max_num_waiting=10) as llm:
        yield llm


def test_a_chat_has_a_salt_of_its_own(llm: LLM) -> None:
    salts = ("a", "b", "a", "b", None)
    outputs = [llm.chat(CHAT, GREEDY, use_tqdm=False, cache_salt=salt, priority=-3)[0] for salt in salts]
    cached = [output.num_cached_tokens for output in outputs]
    assert cached[0] == cached[1] == cached[4] == 0
    assert cached[2] == cached[3] > 0


@pytest.mark.parametrize(
    ("options", "told"),
    [({"priority": "high"}, "priority='high' must be an integer"), ({"cache_salt": "\ud800"}, "cache_salt")],
)
def test_a_wrong_option_ends_nothing_but_its_request(llm: LLM, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        llm.chat(CHAT, GREEDY, use_tqdm=False, **options)
    with pytest.raises(InvalidRequest, match=told):
        llm.generate("a", GREEDY, use_tqdm=False, **options)
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished
    assert llm.stats().num_restarts == 0


def test_template_variables_have_a_place_of_their_own(llm: LLM) -> None:
    plain, glad = (
        llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template_kwargs=variables)[0].prompt_token_ids
        for variables in (None, {"mood": "glad"})
    )
    assert len(glad) > len(plain)
    with pytest.raises(InvalidRequest, match="chat_template_kwargs must be a mapping, not list"):
        llm.chat(CHAT, GREEDY, chat_template_kwargs=["mood"])  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"max_tokens": 3}, "greedy", 5, [GREEDY, {"max_tokens": 3}]])
def test_parameters_of_another_type_are_refused(wrong: Any, llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="must be a SamplingParams or a list of them, not") as caught:
        llm.generate(["a", "b"], wrong, use_tqdm=False)
    assert caught.value.param == "sampling_params"


@pytest.mark.parametrize(
    "wrong", [None, 5, b"ab", bytearray(b"ab"), memoryview(b"ab"), {5, 6}, frozenset("a"), np.array(5)]
)
def test_what_is_neither_a_prompt_nor_a_list_is_refused(wrong: Any, llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="prompts must be text, a list of token ids") as caught:
        llm.generate(wrong, GREEDY, use_tqdm=False)
    assert caught.value.param == "prompt"


def test_prompts_come_in_several_forms() -> None:
    assert list_prompts("a b") == ["a b"] and list_prompts({"prompt": "a"}) == [{"prompt": "a"}]
    assert list_prompts([5, 6]) == list_prompts(range(5, 7)) == [[5, 6]]
    assert list_prompts(each for each in ("a", "b")) == list_prompts(("a", "b")) == ["a", "b"]
    assert list_prompts([[5], "a"]) == [[5], "a"] and list_prompts([]) == []
    assert list_prompts(np.array([[5, 6], [7, 8]])) == [[5, 6], [7, 8]]
    assert list_prompts(np.array([5, 6])) == list_prompts(list(np.array([5, 6]))) == [[5, 6]]


def test_a_chat_takes_parts_of_text(llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello " * 40}]}]
    asked = [llm.chat(each, GREEDY, use_tqdm=False)[0].prompt_token_ids for each in (CHAT, parts, [CHAT], [parts])]
    assert asked == [asked[0]] * 4
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content is missing") as caught:
        llm.chat([{"role": "user"}], GREEDY, use_tqdm=False)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("wrong", [CHAT[0], "hello", b"hello", None, 5])
def test_what_is_no_conversation_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages must be a list of .*, or a list of such lists, not"):
        list_conversations(wrong)


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    "content",
    [
        "one two",
        [{"type": "text", "text": "one"}, {"type": "input_text", "text": " two"}],
        ({"type": "output_text", "text": "one "}, {"type": "refusal", "refusal": "two"}),
    ],
)
def test_parts_are_joined_into_one_text(content: object) -> None:
    assert read_messages(user(content)) == ([{"role": "user", "content": "one two"}], [])


def test_other_keys_stay_and_the_callers_messages_too() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call], "name": "x"}]
    read, images = read_messages(messages)
    assert (read, images) == ([{"role": "assistant", "content": "", "tool_calls": [call], "name": "x"}], [])
    assert messages[0]["content"] is None
    assert read_messages([{"role": "assistant", "tool_calls": [call]}])[0][0]["content"] == ""


TEXT = {"type": "text", "text": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ("hello", "messages must be a list of {'role': ..., 'content': ...}, not str"),
        (["x"], "messages[0] must be a mapping with role and content, not str"),
        ([{"content": "x"}], "messages[0].role must be a string, not NoneType"),
        ([*user("x"), {"role": "user"}], "messages[1].content is missing: it must be a string or"),
        ([{"role": "assistant", "content": None}], "messages[0].content is missing"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content is missing"),
        (user(5), "messages[0].content must be a string or a list of text parts, not int"),
        (user(TEXT), "messages[0].content must be a string or a list of text parts, not dict"),
        ([{"role": "system", "content": [TEXT, IMAGE]}], "messages[0].content[1]: only text parts are supported, not"),
        (user(["x"]), "messages[0].content[0]: only text parts are supported, not 'str'"),
        (user([{"type": ["text"], "text": "x"}]), "messages[0].content[0]: only text parts are supported"),
        (user([{"type": "text"}]), "messages[0].content[0].text must be a string, not NoneType"),
        (user([{"type": "refusal", "text": "x"}]), "messages[0].content[0].refusal must be a string"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_its_place(messages: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_messages(messages)
    assert str(caught.value).startswith(told)
    assert caught.value.param == "messages"


def test_logprobs_are_a_mapping_by_token_id(llm: LLM) -> None:
    (output,) = llm.generate("a", replace(GREEDY, logprobs=2, prompt_logprobs=0), use_tqdm=False)
    (choice,) = output.outputs
    assert choice.logprobs is not None
    for token_id, found in zip(choice.token_ids, choice.logprobs, strict=True):
        assert list(found) == [token_id, found.top[1].token_id] and len(found) == 2
        assert found[token_id] is found.get(token_id) and found[token_id].rank == 1
        assert dict(found.items()) == dict(found) and token_id in found and -1 not in found


def test_logprobs_of_all_tokens_need_the_setting(checkpoint: Path, llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"logprobs=-1 must be an integer from 0 to 20; .*max_logprobs"):
        llm.generate("a", replace(GREEDY, logprobs=-1))
    with LLM(str(checkpoint), num_blocks=40, num_threads=1, max_logprobs=-1) as open_llm:
        (output,) = open_llm.generate("a", replace(GREEDY, logprobs=-1, temperature=1e300), use_tqdm=False)
        (found, *_) = output.outputs[0].logprobs or ()
        vocab_size = open_llm.tokenizer.vocab_size if open_llm.tokenizer else 0
        assert len(found) == vocab_size
        assert sum(math.exp(each.logprob) for each in found.values()) == pytest.approx(1)


def test_a_prompt_is_cut_to_its_last_tokens(llm: LLM) -> None:
    (whole, cut, fitted) = llm.generate(
        ["one two three", "one two three", "a" * 3000],
        [GREEDY, replace(GREEDY, truncate_prompt_tokens=2), replace(GREEDY, truncate_prompt_tokens=-1)],
        use_tqdm=False,
    )
    assert cut.prompt_token_ids == whole.prompt_token_ids[-2:]
    assert len(fitted.prompt_token_ids) == llm.resolved.max_model_len - 1
    (output,) = llm.generate("one", replace(GREEDY, detokenize=False), use_tqdm=False)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 3)


def test_a_beam_of_one_is_greedy_and_more_find_what_is_likelier(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=0)
    (greedy,) = llm.generate("one two", params, use_tqdm=False)
    one, four = (
        llm.beam_search("one two", BeamSearchParams(width, 4, ignore_eos=True))[0].sequences for width in (1, 4)
    )
    assert one[0].tokens == [*greedy.prompt_token_ids, *greedy.outputs[0].token_ids]
    assert one[0].cum_logprob == pytest.approx(greedy.outputs[0].cumulative_logprob)
    scores = [beam.cum_logprob for beam in four]
    assert len(four) == 4 and scores == sorted(scores, reverse=True) and scores[0] >= one[0].cum_logprob - 1e-6
    assert four[0].text.startswith("one two") and four[0].finish_reason == "length"


def test_the_calls_of_vllm_are_there(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    assert llm.get_tokenizer().encode("one") == llm.tokenizer.encode("one")  # type: ignore[union-attr]
    outputs = llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, -1])
    assert len(outputs) == 2
    with pytest.raises(InvalidRequest, match="priority has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[1])
    with pytest.raises(InvalidRequest, match="does not classify"):
        llm.classify("a")
    llm.sleep()
    with pytest.raises(EngineSleeping):
        llm.generate("a", GREEDY)
    with pytest.raises(InvalidRequest, match="must be None or both of"):
        llm.wake_up(["weights"])
    llm.wake_up()
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].outputs == outputs[0].outputs
    assert llm.reset_prefix_cache()


def test_a_chat_has_tools_and_may_go_on_with_its_last_message(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "find", "parameters": {}}}
    plain, tools, open_end = (
        llm.chat(TALK, GREEDY, use_tqdm=False, **options)[0].prompt_token_ids
        for options in ({}, {"tools": [tool]}, {"continue_final_message": True})
    )
    assert len(tools) > len(plain) > len(open_end)
