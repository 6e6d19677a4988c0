"""openai and anthropic: what their suites ask of a server, as a share of cases that pass; the names of the others.

python tests/clients/openai_client.py URL/v1 KEY
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import anthropic
import openai
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """A person of the text."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "find_weather", "description": "Find the weather.", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
FLAT: Any = [{"type": "function", **FUNCTION}]
CLAUDE: Any = [{"name": "find_weather", "description": "Find the weather.", "input_schema": SCHEMA}]
SHAPE: Any = {
    "type": "json_schema",
    "json_schema": {"name": "p", "schema": Person.model_json_schema(), "strict": True},
}
MESSAGES: Any = [{"role": "user", "content": "Ada is 36 and lives in Paris."}]
FORCED: Any = {"type": "function", "function": {"name": "find_weather"}}


def list_openai(client: openai.OpenAI) -> dict[str, Callable[[], Any]]:
    """Each case raises or returns something false where it fails."""
    model = client.models.list().data[0].id
    fields: Any = {"model": model, "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    chat, responses = client.chat.completions, client.responses

    def stream(**more: Any) -> list[Any]:
        return list(chat.create(**fields | more, stream=True))

    def call_of(reply: Any) -> Any:
        return json.loads(reply.choices[0].message.tool_calls[0].function.arguments)["city"] is not None

    def loop() -> Any:
        first = chat.create(**fields, tools=TOOLS, tool_choice="required").choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}
        return chat.create(
            **fields | {"messages": [*MESSAGES, first.model_dump(exclude_none=True), result]}, tools=TOOLS
        )

    def go_on() -> Any:
        first = responses.create(model=model, input="Hello!", max_output_tokens=20)
        second = responses.create(
            model=model, input="And?", previous_response_id=first.id, max_output_tokens=20
        )
        return second.previous_response_id == first.id and responses.retrieve(first.id).id == first.id

    def refuse(error: type[Exception], **more: Any) -> bool:
        try:
            chat.create(**fields | more)
        except error:
            return True
        return False

    return {
        "models": lambda: client.models.retrieve(model).id == model,
        "chat": lambda: chat.create(**fields).choices[0].message.role == "assistant",
        "n": lambda: len(chat.create(**fields | {"temperature": 1}, n=3).choices) == 3,
        "stop": lambda: chat.create(**fields, stop=["a", "e"]).choices[0].finish_reason == "stop",
        "seed": lambda: (
            len(
                {
                    chat.create(**fields | {"temperature": 1}, seed=7).choices[0].message.content
                    for _ in range(2)
                }
            )
            == 1
        ),
        "logprobs": lambda: (
            chat.create(**fields, logprobs=True, top_logprobs=3).choices[0].logprobs.content[0].top_logprobs
        ),
        "logit_bias": lambda: chat.create(**fields, logit_bias={"5": -100}),
        "max_completion_tokens": lambda: (
            chat.create(model=model, messages=MESSAGES, max_completion_tokens=3).usage.completion_tokens <= 3
        ),
        "stream": lambda: stream()[-1].choices[0].finish_reason,
        "stream usage": lambda: stream(stream_options={"include_usage": True})[-1].usage.total_tokens,
        "json_object": lambda: (
            json.loads(
                chat.create(**fields | {"max_tokens": 300}, response_format={"type": "json_object"})
                .choices[0]
                .message.content
            )
            is not None
        ),
        "json_schema": lambda: Person.model_validate_json(
            chat.create(**fields, response_format=SHAPE).choices[0].message.content
        ),
        "parse": lambda: chat.parse(**fields, response_format=Person).choices[0].message.parsed,
        "tools auto": lambda: chat.create(**fields, tools=TOOLS).choices[0].message,
        "tools required": lambda: call_of(chat.create(**fields, tools=TOOLS, tool_choice="required")),
        "tools forced": lambda: call_of(chat.create(**fields, tools=TOOLS, tool_choice=FORCED)),
        "tools none": lambda: (
            not chat.create(**fields, tools=TOOLS, tool_choice="none").choices[0].message.tool_calls
        ),
        "tools stream": lambda: any(
            c.choices and c.choices[0].delta.tool_calls for c in stream(tools=TOOLS, tool_choice=FORCED)
        ),
        "tools loop": loop,
        "tools with schema, forced": lambda: call_of(
            chat.create(**fields, tools=TOOLS, tool_choice=FORCED, response_format=SHAPE)
        ),
        "tools with schema, auto": lambda: (
            chat.create(**fields, tools=TOOLS, response_format=SHAPE).choices[0].message
        ),
        "user, metadata, store": lambda: chat.create(**fields, user="me", metadata={"a": "b"}, store=True),
        "completions": lambda: (
            client.completions.create(model=model, prompt="Once", max_tokens=5).choices[0].text
        ),
        "completions echo": lambda: (
            client.completions.create(model=model, prompt="Once", max_tokens=1, echo=True, logprobs=1)
            .choices[0]
            .logprobs
        ),
        "responses": lambda: responses.create(model=model, input="Hello!").output_text,
        "responses parse": lambda: (
            responses.parse(model=model, input="Ada is 36.", text_format=Person).output_parsed
        ),
        "responses stream": lambda: (
            [e.type for e in responses.create(model=model, input="Hi", stream=True)][-1]
            == "response.completed"
        ),
        "responses tools": lambda: (
            responses.create(model=model, input="Paris?", tools=FLAT, tool_choice="required").output[0].name
        ),
        "previous_response_id": go_on,
        "wrong model": lambda: refuse(openai.NotFoundError, model="gpt"),
        "wrong value": lambda: refuse(openai.BadRequestError, temperature=9),
    }


def list_anthropic(client: anthropic.Anthropic, model: str) -> dict[str, Callable[[], Any]]:
    fields: Any = {"model": model, "messages": MESSAGES, "max_tokens": 60}
    create = client.messages.create

    def stream_text() -> str:
        with client.messages.stream(**fields) as events:
            return "".join(events.text_stream) + str(events.get_final_message().stop_reason)

    def loop() -> Any:
        first = create(**fields, tools=CLAUDE, tool_choice={"type": "any"})
        use = next(block for block in first.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
        turns = [
            *MESSAGES,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        return create(**fields | {"messages": turns}, tools=CLAUDE)

    return {
        "message": lambda: create(**fields).content[0].text,
        "system": lambda: create(**fields, system="Be brief."),
        "system blocks": lambda: create(**fields, system=[{"type": "text", "text": "Be brief."}]),
        "stop_sequences": lambda: create(**fields, stop_sequences=["a"]).stop_reason == "stop_sequence",
        "prefill": lambda: (
            create(**fields | {"messages": [*MESSAGES, {"role": "assistant", "content": "It is"}]}).content
        ),
        "stream": stream_text,
        "count_tokens": lambda: client.messages.count_tokens(model=model, messages=MESSAGES).input_tokens,
        "tools auto": lambda: create(**fields, tools=CLAUDE).stop_reason,
        "tools any": lambda: (
            create(**fields, tools=CLAUDE, tool_choice={"type": "any"}).stop_reason == "tool_use"
        ),
        "tools loop": loop,
        "thinking": lambda: create(**fields, thinking={"type": "disabled"}),
        "metadata": lambda: create(**fields, metadata={"user_id": "me"}),
        "models": lambda: client.models.list().data[0].id,
        "output_config": lambda: create(
            **fields, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}
        ),
    }


def main() -> int:
    url, key = sys.argv[1:]
    one = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    other = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0)
    suites = {"openai": list_openai(one), "anthropic": list_anthropic(other, one.models.list().data[0].id)}
    num_failed = 0
    for suite, cases in suites.items():
        failed = {}
        for name, case in cases.items():
            try:
                failed |= {} if case() else {name: "nothing came"}
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {str(error)[:120]}"
        num_failed += len(failed)
        print(f"{suite}: {len(cases) - len(failed)} of {len(cases)}", failed or "")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
