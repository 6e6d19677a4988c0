"""openai: chat, streams, tools, structured output, text completions, responses, embeddings, errors."""

import asyncio
import json
from typing import Any

import openai
from cases import ASK, FACT, MODEL, NAMED, PIXEL, SCHEMA, SHAPE, TOOLS, Person, is_city, refused, run

FLAT: Any = [{"type": "function", "name": "find_weather", "parameters": SCHEMA, "strict": True}]


class OpenAI:
    def __init__(self, url: str, key: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        self._chat, self._responses = self._client.chat.completions, self._client.responses

    def _ask(self, **more: Any) -> Any:
        fields: Any = {"model": MODEL, "messages": ASK, "max_tokens": 60, "temperature": 0}
        return self._chat.create(**fields | more)

    def _text(self, **more: Any) -> str:
        return str(self._ask(**more).choices[0].message.content)

    def _call(self, **more: Any) -> str:
        choice = self._ask(tools=TOOLS, **more).choices[0]
        assert choice.message.tool_calls[0].function.name == "find_weather", choice
        return str(choice.message.tool_calls[0].function.arguments)

    def models(self) -> None:
        assert MODEL in [each.id for each in self._client.models.list()]
        assert self._client.models.retrieve(MODEL).id == MODEL

    def chat_and_usage(self) -> None:
        reply = self._ask()
        usage, choice = reply.usage, reply.choices[0]
        assert (choice.message.role, choice.finish_reason) == ("assistant", "stop") and choice.message.content
        assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens

    def stream_and_usage(self) -> None:
        chunks = list(self._ask(stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == self._text()
        assert chunks[-1].choices[0].finish_reason == "stop"
        *_, last = self._ask(stream=True, stream_options={"include_usage": True})
        assert last.choices == [] and last.usage.total_tokens > last.usage.completion_tokens > 0

    def stream_is_left_early(self) -> None:
        stream = self._ask(stream=True, max_tokens=1000, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        assert self._text()

    def stream_helper_parses(self) -> None:
        fields: Any = {"model": MODEL, "messages": FACT, "max_tokens": 120, "response_format": Person}
        with self._chat.stream(**fields) as events:
            kinds = {event.type for event in events}
            assert isinstance(events.get_final_completion().choices[0].message.parsed, Person)
        assert {"content.delta", "content.done"} <= kinds, kinds

    def n(self) -> None:
        assert [choice.index for choice in self._ask(n=3, temperature=1).choices] == [0, 1, 2]

    def stop(self) -> None:
        reply = self._ask(stop=["a", "e"]).choices[0]
        assert reply.finish_reason == "stop" and not set("ae") & set(reply.message.content)

    def seed(self) -> None:
        assert len({self._text(seed=7, temperature=1) for _ in range(3)}) == 1

    def logprobs(self) -> None:
        entries = self._ask(logprobs=True, top_logprobs=3).choices[0].logprobs.content
        assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
        assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)  # greedy

    def logit_bias(self) -> None:
        first = self._ask(logprobs=True, extra_body={"return_token_ids": True}).choices[0].token_ids[0]
        assert self._text(logit_bias={str(first): -100}) != self._text()

    def max_completion_tokens(self) -> None:
        reply = self._chat.create(model=MODEL, messages=ASK, max_completion_tokens=3)
        assert reply.usage.completion_tokens == 3 and reply.choices[0].finish_reason == "length"

    def json_object(self) -> None:
        text = self._text(messages=FACT, response_format={"type": "json_object"}, max_tokens=400)
        assert isinstance(json.loads(text), dict)

    def json_schema(self) -> None:
        assert is_city(self._text(response_format=SHAPE))
        pieces = self._ask(response_format=SHAPE, stream=True)
        assert is_city("".join(piece.choices[0].delta.content or "" for piece in pieces))

    def parse(self) -> None:
        fields: Any = {"model": MODEL, "messages": FACT, "max_tokens": 120}
        reply = self._chat.parse(**fields, response_format=Person)
        assert isinstance(reply.choices[0].message.parsed, Person)

    def parse_tool(self) -> None:
        fields: Any = {"model": MODEL, "messages": FACT, "max_tokens": 120, "tool_choice": "required"}
        reply = self._chat.parse(**fields, tools=[openai.pydantic_function_tool(Person)])
        assert isinstance(reply.choices[0].message.tool_calls[0].function.parsed_arguments, Person)

    def tools_auto(self) -> None:
        choice = self._ask(tools=TOOLS, tool_choice="auto").choices[0]
        assert choice.message.content or choice.message.tool_calls

    def tools_required_and_named(self) -> None:
        assert is_city(self._call(tool_choice="required")) and is_city(self._call(tool_choice=NAMED))

    def tools_none(self) -> None:
        assert not self._ask(tools=TOOLS, tool_choice="none").choices[0].message.tool_calls

    def tools_parallel(self) -> None:
        fields: Any = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 300}
        calls = self._ask(**fields, parallel_tool_calls=True).choices[0].message.tool_calls
        assert calls and len({call.id for call in calls}) == len(calls)
        assert len(self._ask(**fields, parallel_tool_calls=False).choices[0].message.tool_calls) == 1

    def tools_stream(self) -> None:
        chunks = self._ask(tools=TOOLS, tool_choice=NAMED, stream=True)
        deltas = [d for chunk in chunks for d in chunk.choices[0].delta.tool_calls or ()]
        assert deltas[0].function.name == "find_weather" and deltas[0].id
        assert is_city("".join(delta.function.arguments or "" for delta in deltas))

    def tools_loop(self) -> None:
        called = self._ask(tools=TOOLS, tool_choice="required").choices[0].message
        result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "sunny"}
        turns = [*ASK, called.model_dump(exclude_none=True), result]
        assert self._ask(messages=turns, tools=TOOLS).choices[0].message.content

    def tools_beside_a_schema(self) -> None:
        shape = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema()}}
        assert is_city(self._call(tool_choice=NAMED, response_format=shape))
        message = self._ask(tools=TOOLS, response_format=shape, max_tokens=120).choices[0].message
        assert message.tool_calls or Person.model_validate_json(message.content)

    def bookkeeping_fields(self) -> None:
        assert self._text(user="me", metadata={"a": "b"}, store=True, service_tier="auto")
        assert self._text(reasoning_effort="low")

    def completions(self) -> None:
        fields: Any = {"model": MODEL, "prompt": ["Once", "Ada"], "max_tokens": 5}
        reply = self._client.completions.create(**fields, echo=True, logprobs=1)
        assert [choice.text[:3] for choice in reply.choices] == ["Onc", "Ada"]
        assert all(len(each.logprobs.tokens) == len(each.logprobs.token_logprobs) for each in reply.choices)
        pieces = self._client.completions.create(**fields | {"prompt": "Once"}, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces)

    def responses(self) -> None:
        reply = self._responses.create(model=MODEL, instructions="Be brief.", input=ASK)
        assert reply.status == "completed" and reply.output_text and reply.usage.output_tokens

    def responses_parse(self) -> None:
        reply = self._responses.parse(model=MODEL, input=FACT, text_format=Person, max_output_tokens=120)
        assert isinstance(reply.output_parsed, Person)

    def responses_stream(self) -> None:
        events = list(self._responses.create(model=MODEL, input=ASK, stream=True))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert events[-1].type == "response.completed" and events[-1].response.output_text == text

    def responses_tools(self) -> None:
        fields: Any = {"model": MODEL, "tools": FLAT, "max_output_tokens": 60}
        first = self._responses.create(**fields, input=ASK, tool_choice="required")
        call = first.output[0]
        assert is_city(call.arguments)
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        assert self._responses.create(**fields, input=[result], previous_response_id=first.id).output_text

    def responses_are_kept(self) -> None:
        first = self._responses.create(model=MODEL, input=ASK)
        assert self._responses.retrieve(first.id).output_text == first.output_text
        assert [item.role for item in self._responses.input_items.list(first.id)] == ["user"]
        self._responses.delete(first.id)
        refused(openai.NotFoundError, self._responses.retrieve, first.id)

    def responses_logprobs(self) -> None:
        fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        reply = self._responses.create(model=MODEL, input=ASK, **fields)
        entries = reply.output[0].content[0].logprobs
        assert entries and all(len(entry.top_logprobs) == 2 for entry in entries)

    def embeddings(self) -> None:
        found = self._client.embeddings.create(model=MODEL, input=["a cat", "a dog"]).data
        assert [each.index for each in found] == [0, 1] and len(found[0].embedding) == 256

    def image_is_refused_by_name(self) -> None:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        turns = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
        assert "image_url" in str(refused(openai.BadRequestError, self._ask, messages=turns))

    def errors_by_class(self) -> None:
        assert "gpt" in str(refused(openai.NotFoundError, self._ask, model="gpt"))
        assert "temperature" in str(refused(openai.BadRequestError, self._ask, temperature=9))
        stranger = self._client.with_options(api_key="wrong")
        refused(openai.AuthenticationError, stranger.models.list)
        turns = [{"role": "user", "content": "word " * 5000}]
        assert refused(openai.BadRequestError, self._ask, messages=turns).code == "context_length_exceeded"

    def timeout(self) -> None:
        long: Any = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
        refused(openai.APITimeoutError, self._ask, **long, timeout=0.1)
        assert self._text()

    async def async_side_by_side(self) -> None:
        async with openai.AsyncOpenAI(base_url=self._client.base_url, api_key=self._client.api_key) as client:
            fields: Any = {"model": MODEL, "messages": ASK, "max_tokens": 60, "temperature": 0}
            replies = await asyncio.gather(*(client.chat.completions.create(**fields) for _ in range(8)))
            stream = await client.chat.completions.create(**fields, stream=True)
            pieces = [piece.choices[0].delta.content or "" async for piece in stream]
        assert {reply.choices[0].message.content for reply in replies} == {"".join(pieces)}


if __name__ == "__main__":
    run(OpenAI)
