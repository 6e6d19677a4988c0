"""langchain: both of its clients, OpenAI's and Anthropic's; chat, streams, tools, structured output, an agent."""

import json
from typing import Any

import openai
from cases import MODEL, PIXEL, QUESTION, SCHEMA, Person, is_city, refused, run
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

FACT = "Ada Lovelace was born in 1815 in London."


@tool(args_schema=SCHEMA)
def find_weather(city: str) -> str:
    """Find the weather."""
    return f"sunny in {city}"


class Langchain:
    def __init__(self, url: str, key: str) -> None:
        self._settings: Any = {"base_url": f"{url}/v1", "api_key": key, "model": MODEL, "max_retries": 0}
        self._settings |= {"temperature": 0, "max_tokens": 120}
        self._chat = ChatOpenAI(**self._settings)
        self._responses = ChatOpenAI(**self._settings, use_responses_api=True)
        self._claude = ChatAnthropic(**self._settings | {"base_url": url})

    def _parse(self, chat: Any, method: str) -> None:
        assert isinstance(chat.with_structured_output(Person, method=method).invoke(FACT), Person)

    def invoke_and_usage(self) -> None:
        answer = self._chat.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
        assert answer.content and answer.usage_metadata["output_tokens"] > 0
        assert answer.response_metadata["finish_reason"] == "stop"

    def stream_and_usage(self) -> None:
        chunks = list(self._chat.stream(QUESTION, stream_usage=True))
        assert "".join(chunk.content for chunk in chunks) == self._chat.invoke(QUESTION).content
        assert any(chunk.usage_metadata for chunk in chunks)

    async def async_side_by_side(self) -> None:
        answers = await self._chat.abatch([QUESTION] * 4)
        text = "".join([chunk.content async for chunk in self._chat.astream(QUESTION)])
        assert {answer.content for answer in answers} == {text}

    def history(self) -> None:
        turns = [HumanMessage(QUESTION), AIMessage("A model."), HumanMessage("And?")]
        assert self._chat.invoke(turns).content

    def output_by_json_schema(self) -> None:
        self._parse(self._chat, "json_schema")

    def output_by_function_calling(self) -> None:
        self._parse(self._chat, "function_calling")

    def output_by_json_mode(self) -> None:
        """The mode promises JSON of any form."""
        asked = f"{FACT} Answer in JSON with kind, name and year."
        parser = self._chat.with_structured_output(Person, method="json_mode", include_raw=True)
        assert isinstance(json.loads(parser.invoke(asked)["raw"].content), dict)

    def output_stream(self) -> None:
        *_, last = self._chat.with_structured_output(SCHEMA | {"title": "Answer"}).stream(QUESTION)
        assert is_city(last)

    def tools_auto(self) -> None:
        answer = self._chat.bind_tools([find_weather]).invoke(QUESTION)
        assert answer.content or answer.tool_calls

    def tools_any_and_named(self) -> None:
        for choice in ("any", "find_weather"):
            answer = self._chat.bind_tools([find_weather], tool_choice=choice).invoke(QUESTION)
            assert is_city(answer.tool_calls[0]["args"]), answer

    def tools_stream(self) -> None:
        bound = self._chat.bind_tools([find_weather], tool_choice="any")
        first, *others = bound.stream(QUESTION)
        for chunk in others:
            first += chunk
        assert is_city(first.tool_calls[0]["args"])

    def tools_result(self) -> None:
        called = self._chat.bind_tools([find_weather], tool_choice="any").invoke(QUESTION)
        result = ToolMessage("sunny", tool_call_id=called.tool_calls[0]["id"])
        assert self._chat.bind_tools([find_weather]).invoke([HumanMessage(QUESTION), called, result]).content

    def tools_beside_a_schema(self) -> None:
        bound = self._chat.bind_tools([find_weather], response_format=Person, strict=True)
        answer = bound.invoke(FACT)
        assert answer.tool_calls or Person.model_validate_json(answer.content)

    def agent(self) -> None:
        answer = create_agent(self._chat, tools=[find_weather]).invoke({"messages": QUESTION})
        assert answer["messages"][-1].content

    def agent_with_output(self) -> None:
        agent = create_agent(self._chat, tools=[find_weather], response_format=Person)
        assert isinstance(agent.invoke({"messages": FACT})["structured_response"], Person)

    def logprobs(self) -> None:
        answer = self._chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
        assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2

    def text_completion(self) -> None:
        assert OpenAI(**self._settings).invoke("Once")

    def responses(self) -> None:
        text = self._responses.invoke(QUESTION).text
        assert text == "".join(chunk.text for chunk in self._responses.stream(QUESTION))

    def responses_tools_and_output(self) -> None:
        called = self._responses.bind_tools([find_weather], tool_choice="any").invoke(QUESTION)
        assert is_city(called.tool_calls[0]["args"])
        self._parse(self._responses, "json_schema")

    def embeddings(self) -> None:
        embedder = OpenAIEmbeddings(
            base_url=self._settings["base_url"], api_key=self._settings["api_key"], model=MODEL,
            check_embedding_ctx_length=False,
        )
        assert [len(each) for each in embedder.embed_documents(["a cat", "a dog"])] == [256, 256]

    def image_is_refused_by_name(self) -> None:
        image = {"type": "image", "base64": PIXEL, "mime_type": "image/png"}
        assert "image_url" in str(refused(openai.BadRequestError, self._chat.invoke, [HumanMessage([image])]))

    def unknown_model(self) -> None:
        other = ChatOpenAI(**self._settings | {"model": "no_such_model"})
        assert "no_such_model" in str(refused(openai.NotFoundError, other.invoke, QUESTION))

    def claude_invoke_and_stream(self) -> None:
        answer = self._claude.invoke(QUESTION)
        assert "".join(chunk.text for chunk in self._claude.stream(QUESTION)) == answer.text
        assert answer.usage_metadata["output_tokens"] > 0

    def claude_tools(self) -> None:
        answer = self._claude.bind_tools([find_weather], tool_choice="any").invoke(QUESTION)
        assert is_city(answer.tool_calls[0]["args"])
        assert self._claude.bind_tools([find_weather]).invoke(QUESTION).content

    def claude_output(self) -> None:
        for method in ("function_calling", "json_schema"):
            self._parse(self._claude, method)


if __name__ == "__main__":
    run(Langchain)
