"""Ollama's API through its official client: chat, generate, tools, formats, thinking, images, lists, errors."""

import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from ollama import AsyncClient, ResponseError

from engine import EngineError
from tests.app.api.harness import Server, Start
from tests.app.api.test_thinking import thinker
from tests.app.api.test_tools import CALL, TOOLS, tagged
from tests.fakes import FakeEngine, FakeTokenizer

ClientOf = Callable[[Server], AsyncClient]
USER = [{"role": "user", "content": "hello"}]
PNG = base64.b64encode(b"\x89PNG").decode()


@pytest.fixture
async def client_of() -> AsyncIterator[ClientOf]:
    async with AsyncExitStack() as stack:

        def make_client(server: Server) -> AsyncClient:
            client = AsyncClient(host=server.url)
            stack.push_async_callback(client.close)
            return client

        yield make_client


async def collect(stream: Any) -> list[Any]:
    return [part async for part in await stream]


@pytest.fixture
async def server(start: Start) -> Server:
    return await start(FakeEngine(record='{"name": "Ada", "age": 36}'))


async def test_chat_is_the_same_whole_and_as_a_stream(server: Server, client_of: ClientOf) -> None:
    client = client_of(server)
    whole = await client.chat("fake:latest", USER)
    assert (whole.message.content, whole.done, whole.done_reason) == ("You said <user>hello", True, "stop")
    assert whole.prompt_eval_count and whole.eval_count and whole.eval_duration >= 0 and whole.model == "fake"
    *parts, last = await collect(client.chat("fake", USER, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content and len(parts) > 1
    assert (last.done, last.message.content, last.eval_count) == (True, "", whole.eval_count)


async def test_generate_uses_the_template_unless_raw(server: Server, client_of: ClientOf) -> None:
    client = client_of(server)
    assert (await client.generate("fake", "hi", system="Be brief.")).response == "You said <user>hi"
    assert server.engine.requests[-1].prompt.startswith("<system>Be brief.")
    parts = await collect(client.generate("fake", "hi", raw=True, stream=True))
    assert "".join(part.response for part in parts) == "You said hi" and parts[-1].done_reason == "stop"
    assert (server.engine.requests[-1].prompt, server.engine.requests[-1].params.max_tokens) == ("hi", None)
    assert (await client.generate("fake", "")).done_reason == "load"


async def test_options_reach_the_engine_and_those_of_the_runner_are_named(server: Server) -> None:
    options = {
        "temperature": 0.5, "num_predict": 3, "seed": 7, "top_k": 9, "top_p": 0.8, "stop": ["x"], "num_ctx": 9999,
        "repeat_penalty": 1.1, "repeat_last_n": 64, "num_gpu": 4,
    }
    body = {"model": "fake", "messages": USER, "stream": False, "options": options, "keep_alive": "5m"}
    status, headers, reply = await server.ask("/api/chat", "POST", json=body)
    params = server.engine.requests[-1].params
    assert (status, reply["done_reason"], params.max_tokens, params.seed) == (200, "length", 3, 7)
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.5, 9, 0.8, 1.1)
    assert list(params.stop) == ["x"]
    for name in ("keep_alive", "options.num_gpu", "options.num_ctx=9999", "options.repeat_last_n=64"):
        assert name in headers["x-troupe-warning"]
    assert (await server.post("/api/chat", body | {"options": {"num_predict": -1, "seed": -1}}))[0] == 200
    assert server.engine.requests[-1].params.max_tokens is None


@pytest.mark.parametrize("schema", ["json", {"type": "object", "properties": {"age": {"type": "integer"}}}])
async def test_a_format_is_a_grammar(server: Server, schema: Any, client_of: ClientOf) -> None:
    reply = await client_of(server).chat("fake", USER, format=schema)
    grammar = server.engine.requests[-1].params.grammar
    assert json.loads(reply.message.content) == {"name": "Ada", "age": 36}
    assert grammar.kind == ("json_object" if schema == "json" else "json_schema")


async def test_calls_come_whole_and_their_results_find_them(start: Start, client_of: ClientOf) -> None:
    text = "Let me see.\n" + tagged(CALL)
    server = await start(FakeEngine(reply=lambda _: text, record=text, tokenizer=FakeTokenizer(knows_tools=True)))
    client = client_of(server)
    whole = await client.chat("fake", USER, tools=TOOLS)
    parts = await collect(client.chat("fake", USER, tools=TOOLS, stream=True))
    streamed = [call for part in parts for call in part.message.tool_calls or ()]
    assert [call.function.name for call in streamed] == ["weather"] and streamed == whole.message.tool_calls
    assert streamed[0].function.arguments == {"city": 'a "}{ \\ b'}
    result = {"role": "tool", "content": "21 degrees", "tool_name": "weather"}
    await client.chat("fake", [*USER, whole.message, result], tools=TOOLS)
    assert "<tool>21 degrees" in server.engine.requests[-1].prompt


@pytest.mark.parametrize(("think", "thought"), [(True, "So."), ("low", "So."), (None, "So."), (False, None)])
async def test_thinking_is_a_field_of_its_own(
    start: Start, think: Any, thought: str | None, client_of: ClientOf
) -> None:
    server = await start(thinker("So.\n</think>\n\nTwo." if think is not False else "Two."))
    client = client_of(server)
    whole = await client.chat("fake", USER, think=think)
    parts = await collect(client.chat("fake", USER, think=think, stream=True))
    assert (whole.message.thinking, whole.message.content) == (thought, "Two.")
    assert "".join(part.message.thinking or "" for part in parts).strip() == (thought or "")
    assert (await client.generate("fake", "hi", think=think)).thinking == thought


async def test_images_are_parts_of_the_message(start: Start, client_of: ClientOf) -> None:
    server = await start(FakeEngine(sees_images=True))
    client = client_of(server)
    await client.chat("fake", [{"role": "user", "content": "what?", "images": [PNG]}])
    assert server.engine.requests[-1].prompt.startswith("<user><image>what?")
    await client.generate("fake", "what?", images=[PNG])
    assert server.engine.requests[-1].prompt.startswith("<user><image>what?")


async def test_the_model_is_listed_and_described(server: Server, client_of: ClientOf) -> None:
    client = client_of(server)
    (listed,) = (await client.list()).models
    (running,) = (await client.ps()).models
    shown = await client.show("fake:latest")
    assert listed.model == running.model == "fake:latest" and listed.digest == running.digest
    assert listed.model is not None and (await client.chat(listed.model, USER)).done
    assert shown.capabilities == ["completion"] and shown.modelinfo["FakeForCausalLM.context_length"] == 2048
    assert shown.modelinfo["general.basename"] == "fake"
    version = (await server.get("/api/version"))[1]["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "Copilot refuses older servers"


@pytest.mark.parametrize(
    ("path", "change", "status", "message"),
    [
        ("chat", {"model": "other"}, 404, "the model 'other' does not exist"),
        ("chat", {"options": {"temperature": -1}}, 400, "options.temperature=-1"),
        ("chat", {"options": {"num_predict": 0}}, 400, "options.num_predict=0 must be an integer from 1"),
        ("chat", {"options": {"stop": ["a"] * 17}}, 400, "options.stop has 17 entries"),
        ("chat", {"options": {"mirostat": 2}}, 400, "options.mirostat is not a field"),
        ("chat", {"format": "yaml"}, 400, "format='yaml' must be \"json\" or a JSON Schema"),
        ("chat", {"think": "x"}, 400, "think='x' must be 'low', 'medium' or 'high'"),
        ("chat", {"format": {"type": "nonsense"}}, 400, "nonsense"),
        ("chat", {"messages": [{"role": "poet", "content": "x"}]}, 400, "messages[0].role='poet' must be one of"),
        ("generate", {"prompt": "x", "suffix": "y"}, 400, "suffix is not a field"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "template is not a field"),
        ("generate", {"prompt": "x", "context": [1, 2]}, 400, "context is not a field"),
        ("generate", {"prompt": "x", "raw": True, "system": "s"}, 400, "system needs a chat template"),
        ("pull", {"model": "other"}, 404, "admin routes are off"),
    ],
)
async def test_errors_have_ollamas_form_and_names(
    server: Server, path: str, change: dict[str, Any], status: int, message: str
) -> None:
    body = {"model": "fake", "messages": USER} if path == "chat" else {"model": "fake"}
    found, reply = await server.post(f"/api/{path}", body | change)
    assert (found, list(reply), message in reply["error"]) == (status, ["error"], True), reply


async def test_an_error_within_a_stream_is_its_last_line(start: Start, client_of: ClientOf) -> None:
    server = await start(FakeEngine(fail_after=(2, EngineError("broken"))))
    with pytest.raises(ResponseError, match="could not serve"):
        await collect(client_of(server).chat("fake", USER, stream=True))


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain"])
async def test_json_is_read_whatever_its_content_type(server: Server, content_type: str) -> None:
    text = json.dumps({"model": "fake", "prompt": "hi", "stream": False})
    status, reply = await server.post_text("/api/generate", text, content_type)
    assert (status, reply["response"]) == (200, "You said <user>hi")
