"""anthropic: messages, streams, tools, structured output, token counts, errors."""

import asyncio
from typing import Any

import anthropic
from cases import ASK, FACT, MODEL, PIXEL, QUESTION, SCHEMA, Person, is_city, refused, run

TOOLS: Any = [{"name": "find_weather", "description": "Find the weather.", "input_schema": SCHEMA}]
GREEDY: Any = {"temperature": 0}  # the client has left it to extra_body


@anthropic.beta_tool
def find_weather(city: str) -> str:
    """Find the weather.

    Args:
        city: where.
    """
    return f"sunny in {city}"


class Anthropic:
    def __init__(self, url: str, key: str) -> None:
        self._client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
        self._fields: Any = {"model": MODEL, "messages": ASK, "max_tokens": 60, "extra_body": GREEDY}

    def _ask(self, **more: Any) -> Any:
        return self._client.messages.create(**self._fields | more)

    def message_and_usage(self) -> None:
        reply = self._ask()
        assert reply.content[0].text and reply.stop_reason == "end_turn" and reply.role == "assistant"
        assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens > 0 < reply.usage.output_tokens

    def system_and_blocks(self) -> None:
        assert self._ask(system="Be brief.").content
        blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        assert self._ask(system=blocks).content
        turns = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
        assert self._ask(messages=turns).content[0].text == self._ask().content[0].text

    def stop_sequences(self) -> None:
        reply = self._ask(stop_sequences=["a"])
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "a")

    def max_tokens(self) -> None:
        reply = self._ask(max_tokens=3)
        assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 3)

    def prefill(self) -> None:
        assert self._ask(messages=[*ASK, {"role": "assistant", "content": "I am"}]).content

    def stream_text(self) -> None:
        with self._client.messages.stream(**self._fields) as events:
            text = "".join(events.text_stream)
            assert events.get_final_text() == text == self._ask().content[0].text

    def stream_events(self) -> None:
        kinds = [event.type for event in self._ask(stream=True)]
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], kinds
        assert kinds[1] == "content_block_start" and kinds[-3] == "content_block_stop"

    def count_tokens(self) -> None:
        counted = self._client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens
        usage = self._ask().usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens

    def tools_auto_and_none(self) -> None:
        assert self._ask(tools=TOOLS).stop_reason in ("end_turn", "tool_use")
        assert self._ask(tools=TOOLS, tool_choice={"type": "none"}).stop_reason == "end_turn"

    def tools_any_and_named(self) -> None:
        for choice in ({"type": "any"}, {"type": "tool", "name": "find_weather"}):
            reply = self._ask(tools=TOOLS, tool_choice=choice)
            assert reply.stop_reason == "tool_use" and is_city(reply.content[0].input)

    def tools_stream(self) -> None:
        with self._client.messages.stream(**self._fields, tools=TOOLS, tool_choice={"type": "any"}) as events:
            kinds = {event.type for event in events}
            assert "input_json" in kinds and is_city(events.get_final_message().content[0].input)

    def tools_loop(self) -> None:
        first = self._ask(tools=TOOLS, tool_choice={"type": "any"})
        result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "sunny"}
        said = {"role": "assistant", "content": first.content}
        turns = [*ASK, said, {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]
        assert self._ask(messages=turns, tools=TOOLS).content

    def tool_runner(self) -> None:
        runner = self._client.beta.messages.tool_runner(**self._fields, tools=[find_weather])
        assert runner.until_done().content

    def parse(self) -> None:
        fields = self._fields | {"messages": FACT, "max_tokens": 120}
        assert isinstance(self._client.messages.parse(**fields, output_format=Person).parsed_output, Person)

    def output_config(self) -> None:
        shape = {"format": {"type": "json_schema", "schema": SCHEMA}}
        assert is_city(self._ask(output_config=shape).content[0].text)

    def thinking(self) -> None:
        assert self._ask(thinking={"type": "disabled"}).content[0].type == "text"
        asked = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1500}
        assert self._ask(**asked).content

    def metadata(self) -> None:
        assert self._ask(metadata={"user_id": "me"}, service_tier="auto").content

    def models(self) -> None:
        assert MODEL in [each.id for each in self._client.models.list()]
        assert self._client.models.retrieve(MODEL).type == "model"

    def image_is_refused_by_name(self) -> None:
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
        turns = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        assert "image" in str(refused(anthropic.BadRequestError, self._ask, messages=turns))

    def errors_by_class(self) -> None:
        assert "claude" in str(refused(anthropic.NotFoundError, self._ask, model="claude"))
        assert "temperature" in str(
            refused(anthropic.BadRequestError, self._ask, extra_body={"temperature": 9})
        )
        stranger = self._client.with_options(api_key="wrong")
        refused(anthropic.AuthenticationError, stranger.messages.create, **self._fields)

    def timeout(self) -> None:
        more: Any = {"max_tokens": 1900, "extra_body": {"structured_outputs": {"regex": "[ab]{1900}"}}}
        refused(anthropic.APITimeoutError, self._ask, **more, timeout=0.1)
        assert self._ask().content

    async def async_side_by_side(self) -> None:
        server: Any = {"base_url": self._client.base_url, "api_key": self._client.api_key}
        async with anthropic.AsyncAnthropic(**server) as client:
            replies = await asyncio.gather(*(client.messages.create(**self._fields) for _ in range(4)))
            async with client.messages.stream(**self._fields) as events:
                text = await events.get_final_text()
        assert {reply.content[0].text for reply in replies} == {text}


if __name__ == "__main__":
    run(Anthropic)
