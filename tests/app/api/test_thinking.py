"""Reasoning models: reasoning is separated from content; template options are passed on."""

import base64
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
import pytest

from app.api.chat import UNSET
from app.reasoning import SWITCHES, Thinking, find_thinking, make_splitter, supports_reasoning
from grammar import Reasoning
from tests.app.api.harness import CHAT, Server, Start
from tests.fakes import FakeEngine, FakeTokenizer

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False
FORMAT = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
THOUGHT = "Let me see.\n\nOne or two?"
RECORD = '{"a": 2}'
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL_MESSAGE = "<|start|>assistant<|channel|>final<|message|>"
NO_THOUGHTS = dict.fromkeys(UNSET)


@dataclass
class ThinkingTokenizer(FakeTokenizer):
    """A template that opens the reasoning itself (as R1's does) or leaves it to the model (as Qwen's)."""

    opens: bool = True

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        is_on = kwargs.pop("enable_thinking", True)
        messages = [m | {"content": f"({m['reasoning_content']})" + m["content"]} if "reasoning_content" in m else m
                    for m in map(dict, messages)]
        text = super().apply_chat_template(messages, **kwargs)
        if not kwargs.get("add_generation_prompt", True) or kwargs.get("continue_final_message"):
            return text
        if not is_on:
            return text + "<think>\n\n</think>\n\n"
        return text + "<think>\n" if self.opens else text


def thinker(text: str, opens: bool = True) -> FakeEngine:
    return FakeEngine(reply=lambda _: text, record=text, tokenizer=ThinkingTokenizer(opens=opens))


def message_of(reply: Any) -> Any:
    return reply["choices"][0]["message"]


@pytest.mark.parametrize("opens", [True, False])
async def test_reasoning_is_separated_from_the_content(start: Start, opens: bool) -> None:
    text = f"{'' if opens else '<think>'}\n{THOUGHT}\n</think>\n\nTwo.\n"
    server = await start(thinker(text, opens))
    status, reply = await server.chat()
    assert status == 200, reply
    message = message_of(reply)
    assert (message["reasoning_content"], message["reasoning"]) == (THOUGHT, THOUGHT)
    assert message["content"] == "Two.\n"
    num_thought = text.index("</think>") + len("</think>")
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}
    chunks = await server.chat_chunks(stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("content", "") for delta in deltas) == "Two.\n"
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}


class ChannelTokenizer(FakeTokenizer):
    """A template whose prompts end as those of gpt-oss."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        return super().apply_chat_template(messages, **kwargs) + "<|start|>assistant"


async def test_the_analysis_channel_is_reasoning_and_a_grammar_begins_in_the_final_one(start: Start) -> None:
    text = f"{ANALYSIS}{THOUGHT}<|end|>{FINAL_MESSAGE}{RECORD}"
    server = await start(FakeEngine(reply=lambda _: text, record=text, tokenizer=ChannelTokenizer()))
    status, reply = await server.chat(response_format=FORMAT)
    assert status == 200, reply
    message = message_of(reply)
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, RECORD)
    assert reply["structured"]["valid"] is True
    num_thought = text.index(RECORD)
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_thought
    params = server.engine.requests[-1].params
    assert params.skip_special_tokens is False
    assert params.grammar.reasoning == Reasoning(None, "<|channel|>final<|message|>", True)
    _, reply = await server.chat()
    assert message_of(reply)["content"] == RECORD
    assert supports_reasoning(ChannelTokenizer().apply_chat_template)


async def test_reasoning_that_is_switched_off_is_absent(start: Start) -> None:
    server = await start(thinker(f"{THOUGHT}</think>Two."))
    _, reply = await server.chat(include_reasoning=False)
    assert message_of(reply) == NO_THOUGHTS | {"role": "assistant", "content": "Two.", "refusal": None}
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    chunks = await server.chat_chunks(include_reasoning=False)
    assert not any("reasoning" in json.dumps(chunk["choices"]) for chunk in chunks)
    body = CHAT | {"max_tokens": 99, "thinking": {"type": "adaptive", "display": "omitted"}}
    _, reply = await server.post("/v1/messages", body)
    assert reply["content"] == [{"type": "text", "text": "Two."}]


async def test_truncated_reasoning_leaves_no_content(start: Start) -> None:
    server = await start(thinker(f"{THOUGHT}</think>{RECORD}"))
    _, reply = await server.chat(max_tokens=9, response_format=FORMAT)
    assert message_of(reply)["content"] is None
    assert message_of(reply)["reasoning_content"] == THOUGHT[:9]
    assert (reply["choices"][0]["finish_reason"], reply["structured"]["valid"]) == ("length", False)
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 9}


@pytest.mark.parametrize("opens", [True, False])
async def test_thinking_that_is_switched_off_leaves_the_text_alone(start: Start, opens: bool) -> None:
    server = await start(thinker("<think>x</think>Two.", opens))
    _, reply = await server.chat(chat_template_kwargs={"enable_thinking": False}, response_format=FORMAT)
    assert message_of(reply)["content"] == "<think>x</think>Two."
    assert server.engine.requests[-1].params.grammar.kind == "json_schema"


async def test_an_output_without_reasoning_is_content(start: Start) -> None:
    for engine, text, details in (
        (thinker("Two.", opens=False), "Two.", {"reasoning_tokens": 0}),  # the model need not think
        (FakeEngine(reply=lambda _: "<think>x</think>y"), "<think>x</think>y", None),  # nor does the template
    ):
        _, reply = await (await start(engine)).chat()
        assert message_of(reply) == NO_THOUGHTS | {"role": "assistant", "content": text, "refusal": None}
        assert reply["usage"].get("completion_tokens_details") == details


async def test_constraints_and_forced_calls_follow_the_reasoning(start: Start) -> None:
    server = await start(thinker(f"{THOUGHT}</think>\n\n{RECORD}"))
    _, reply = await server.chat(response_format=FORMAT)
    grammar = server.engine.requests[-1].params.grammar
    assert (grammar.kind, grammar.reasoning) == ("json_schema", Reasoning(None, "</think>", True))
    assert (message_of(reply)["content"], reply["structured"]["valid"]) == (RECORD, True)
    server = await start(thinker(f'{THOUGHT}</think>\n\n[{{"name": "look", "arguments": {{"a": 1}}}}]'))
    _, reply = await server.chat(tools=[TOOL], tool_choice="required")
    message = message_of(reply)
    assert message["reasoning_content"] == THOUGHT
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a": 1}'}
    assert reply["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "fields",
    [{"csv": {"columns": {"n": "integer"}}}, {"xml": {"name": "a"}}, {"grammar": 'start: "a"'},
     {"regex": "a", "backend": "outlines_core"}],
)
async def test_a_grammar_of_any_kind_begins_after_the_reasoning(start: Start, fields: dict[str, Any]) -> None:
    server = await start(thinker("x"))
    status, reply = await server.chat(structured_outputs=fields)
    assert status == 200, reply
    assert server.engine.requests[-1].params.grammar.reasoning == Reasoning(None, "</think>", "xml" in fields)


async def test_the_official_clients_read_reasoning(start: Start) -> None:
    server = await start(thinker(f"{THOUGHT}</think>Two."))
    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    async with client, client.responses.stream(model="fake", input="x") as events:
        kinds = [event.type async for event in events]
        response = await events.get_final_response()
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == "Two."
    assert response.output[0].content[0].text == THOUGHT
    assert response.usage.output_tokens_details.reasoning_tokens == len(THOUGHT + "</think>")
    async with (
        anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=0) as other,
        other.messages.stream(model="fake", max_tokens=99, messages=[{"role": "user", "content": "x"}]) as blocks,
    ):
        message = await blocks.get_final_message()
    assert message.content[0].signature  # clients do not send unsigned reasoning back
    assert [(block.type, getattr(block, block.type)) for block in message.content] == [
        ("thinking", THOUGHT), ("text", "Two.")
    ]


USE = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
TOLD = {"type": "tool_result", "tool_use_id": "1", "content": "sun"}
CALLED = [{"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
          {"type": "function_call_output", "call_id": "1", "output": "sun"}]
SEALED = "troupe:" + base64.b64encode(b"hm").decode()


@pytest.mark.parametrize(
    "item",
    [
        {"content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": "another server's"},
        {"content": None, "encrypted_content": SEALED, "summary": [{"type": "summary_text", "text": "short"}]},
        {"summary": [{"type": "summary_text", "text": "hm"}]},
    ],
)
async def test_reasoning_between_calls_reaches_the_template_on_every_route(start: Start, item: Any) -> None:
    server = await start(thinker("x"))
    user = {"role": "user", "content": "weather?"}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "troupe"}
    messages = [user, {"role": "assistant", "content": [thinking, USE]}, {"role": "user", "content": [TOLD]}]
    asked: list[tuple[str, Any]] = [
        ("responses", {"input": [user, {"type": "reasoning", "summary": []} | item, *CALLED]}),
        ("messages", {"model": "fake", "max_tokens": 9, "messages": messages}),
    ]
    for path, body in asked:
        status, reply = await server.post(f"/v1/{path}", body)
        assert status == 200, reply
        assert "<assistant>(hm)" in server.engine.requests[-1].prompt
    # an answer that never came has no reasoning
    items = [user, {"type": "reasoning", "summary": []} | item, user, {"role": "assistant", "content": "y"}]
    await server.post("/v1/responses", {"input": items})
    assert "hm" not in server.engine.requests[-1].prompt


async def test_a_summary_is_the_reasoning_and_what_is_sealed_can_be_read_again(start: Start) -> None:
    server = await start(thinker(f"{THOUGHT}</think>Two."))
    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    asked: Any = {"model": "fake", "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    async with client, client.responses.stream(input="x", **asked) as events:
        deltas = [event.delta async for event in events if event.type == "response.reasoning_summary_text.delta"]
        first, message = (await events.get_final_response()).output
        assert "".join(deltas) == first.summary[0].text == THOUGHT
        sealed = {"type": "reasoning", "summary": [], "encrypted_content": first.encrypted_content}
        again = [{"role": "user", "content": "x"}, sealed, message.model_dump(exclude_none=True)]
        await client.responses.create(input=again, **asked)
    assert f"({THOUGHT})Two." in server.engine.requests[-1].prompt


async def test_old_reasoning_reaches_the_template(start: Start) -> None:
    server = await start(thinker("x"))
    history = [*CHAT["messages"], {"role": "assistant", "content": "y", "reasoning_content": 5}]
    status, reply = await server.chat(messages=history)
    assert (status, reply["error"]["param"]) == (400, "messages")
    history[-1]["reasoning_content"] = "hm"
    status, _ = await server.chat(messages=history)
    assert status == 200


@pytest.mark.parametrize(
    ("is_open", "keeps_breaks", "text", "thought", "words"),
    [
        (True, False, "\na\n\nb\n</think>\n\nc\n", "a\n\nb", "c\n"), (True, True, "a</think>\n\nc", "a", "\n\nc"),
        (True, False, "<think>a</think>b", "a", "b"), (True, False, "a</thin\n\n", "a</thin", ""),
        (True, False, "", "", ""), (False, False, " \n<think>\na</think>b<think>c</think>", "a", "b<think>c</think>"),
        (False, False, "a<think>b</think>", "", "a<think>b</think>"), (False, False, "<thi", "", "<thi"),
        (False, False, "<think>", "", ""), (False, False, "<think></think>", "", ""),
        (None, False, f"{ANALYSIS}So < it.<|end|>{FINAL_MESSAGE}Two.<|return|>", "So < it.", "Two."),
        (None, False, f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b", "a\n\nb", ""),
        (None, False, f"{ANALYSIS}a<|end|><|start|>assist", "a", ""),
        (None, False, "<|channel|>final<|message|>a<|en", "", "a<|en"), (None, False, "<|x|>plain", "", "<|x|>plain"),
        (None, False, "<|channel|>" + "x" * 300, "", "<|channel|>" + "x" * 300),
    ],
)
def test_any_cut_into_deltas_gives_the_same(
    is_open: bool | None, keeps_breaks: bool, text: str, thought: str, words: str
) -> None:
    """None stands for an output with channels."""
    thinking = Thinking(bool(is_open), keeps_breaks, has_channels=is_open is None)
    draw = random.Random(5)
    for _ in range(60):
        splitter = make_splitter(thinking)
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 8)))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        told = [*map(splitter.feed, pieces), splitter.close()]
        assert tuple(map("".join, zip(*told, strict=True))) == (thought, words)


def test_a_continued_message_may_have_opened_its_reasoning() -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for content, is_open in (("<think>so", True), ("<think>so</think>", False), ("so", False)):
        found = find_thinking(True, "", [{"content": content}], options)
        assert (found is not None and found.is_open) is is_open


@dataclass
class ListeningTokenizer(FakeTokenizer):
    """It remembers what the template was last given."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        self.messages, self.variables = [dict(message) for message in messages], kwargs
        return super().apply_chat_template(messages, **kwargs)


@pytest.mark.parametrize(
    ("fields", "effort", "is_on"),
    [
        ({}, None, None), ({"reasoning_effort": None}, None, None),
        ({"reasoning_effort": "high"}, "high", None), ({"reasoning_effort": "none"}, "none", False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "none", True),
    ],
)
async def test_the_effort_of_reasoning_reaches_the_template(
    start: Start, fields: dict[str, Any], effort: str | None, is_on: bool | None
) -> None:
    tokenizer = ListeningTokenizer()
    server = await start(FakeEngine(tokenizer=tokenizer))
    asked = {"effort": fields["reasoning_effort"]} if "reasoning_effort" in fields else None
    rest = {name: value for name, value in fields.items() if name != "reasoning_effort"}
    for path, body in (
        ("/v1/chat/completions", CHAT | fields),
        ("/v1/responses", {"input": "x", "reasoning": asked} | rest),
        ("/tokenize", CHAT | fields),
    ):
        await server.post(path, body)  # after which nothing is tried out with the template
        status, reply = await server.post(path, body)
        assert status == 200, reply
        heard = tokenizer.variables
        assert (heard.get("reasoning_effort"), heard.get("enable_thinking")) == (effort, is_on), path
        # Templates have their switch under either name; one that the request sets stands alone.
        assert heard.get("thinking") == (None if "chat_template_kwargs" in fields else is_on), path


@pytest.mark.parametrize(
    ("fields", "effort", "is_on"),
    [
        ({"enable_thinking": False}, None, False), ({"thinking": {"type": "disabled"}}, None, False),
        ({"thinking": {"type": "auto"}}, None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, None, True),
        ({"reasoning": {"effort": "low", "exclude": True}}, "low", None), ({"thinking": False}, None, False),
        ({"reasoning": {"enabled": False}}, None, False), ({"reasoning": {"effort": "none"}}, "none", False),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, None, True),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_other_servers_switches_of_reasoning_reach_the_template(
    start: Start, path: str, fields: dict[str, Any], effort: str | None, is_on: bool | None
) -> None:
    tokenizer = ListeningTokenizer()
    server = await start(FakeEngine(tokenizer=tokenizer))
    for _ in range(2):  # after the first nothing is tried out with the template
        status, headers, reply = await server.ask(path, "POST", json=CHAT | fields)
        assert status == 200 and "x-troupe-warning" not in headers, reply
    heard = tokenizer.variables
    assert (heard.get("reasoning_effort"), heard.get("enable_thinking")) == (effort, is_on)


@pytest.mark.parametrize(("kind", "is_on"), [("enabled", True), ("disabled", False), ("adaptive", None)])
async def test_anthropics_thinking_reaches_the_template_under_both_names(
    start: Start, kind: str, is_on: bool | None
) -> None:
    tokenizer = ListeningTokenizer()
    server = await start(FakeEngine(tokenizer=tokenizer))
    body = CHAT | {"max_tokens": 9, "thinking": {"type": kind}}
    for _ in range(2):  # after the first nothing is tried out with the template
        status, reply = await server.post("/v1/messages", body)
        assert status == 200, reply
    assert [tokenizer.variables.get(name) for name in SWITCHES] == [is_on, is_on]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize("name", ["self", "messages", "tools", "tokenize", "padding", "max_length"])
async def test_a_variable_that_is_an_argument_is_refused(server: Server, path: str, name: str) -> None:
    body = {"chat_template_kwargs": {name: 1}} | ({"input": "x"} if path == "/v1/responses" else CHAT)
    status, reply = await server.post(path, body | ({"max_tokens": 5} if path == "/v1/messages" else {}))
    assert status == 400
    assert f"chat_template_kwargs must not set {name!r}" in reply["error"]["message"]


async def test_the_name_of_who_speaks_reaches_the_template(start: Start) -> None:
    tokenizer = ListeningTokenizer()
    server = await start(FakeEngine(tokenizer=tokenizer))
    asked = [{"role": "user", "content": "x", "name": "Ada"}, {"role": "user", "content": "y", "name": None}]
    await server.chat(messages=asked)
    status, reply = await server.chat(messages=asked)
    assert status == 200, reply
    assert [message.get("name") for message in tokenizer.messages] == ["Ada", None]


@pytest.mark.parametrize("name", [5, "", "x" * 257, ["a"]])
async def test_a_name_that_is_none_is_refused(server: Server, name: Any) -> None:
    status, reply = await server.chat(messages=[{"role": "user", "content": "x", "name": name}])
    assert (status, reply["error"]["param"]) == (400, "messages")
    assert reply["error"]["message"] == "messages[0].name must be a text of 1 to 256 characters"
    assert server.engine.requests == []
