"""langchain-openai: chat, stream with usage, structured output, a forced tool, the Responses API, an error."""

import sys

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    is_adult: bool


@tool
def weather(days: int, is_warm: bool) -> str:
    """Look at the sky."""
    return f"{days} {is_warm}"


def main() -> None:
    url, key = sys.argv[1:]
    settings = {"base_url": url, "api_key": key, "model": "demo_model", "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**settings, max_tokens=60)
    answer = chat.invoke("Hello! Who are you?")
    assert answer.content and answer.usage_metadata["output_tokens"] > 0, answer
    chunks = list(chat.stream("Hello! Who are you?", stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    assert any(chunk.usage_metadata for chunk in chunks)
    for method in ("json_schema", "function_calling"):
        longer = ChatOpenAI(**settings, max_tokens=300)
        person = longer.with_structured_output(Person, method=method).invoke("Ada is 36.")
        assert isinstance(person, Person), (method, person)
    with_tools = chat.bind_tools([weather], tool_choice="weather")
    called = with_tools.invoke("How is the weather in Ghent for 3 days?")
    assert set(called.tool_calls[0]["args"]) >= {"days", "is_warm"}, called
    responses = ChatOpenAI(**settings, max_tokens=60, use_responses_api=True)
    assert responses.invoke("Hello! Who are you?").text == answer.content
    streamed = "".join(chunk.text for chunk in responses.stream("Hello! Who are you?"))
    assert streamed == answer.content, streamed
    try:
        ChatOpenAI(**{**settings, "model": "no_such_model"}).invoke("x")
    except openai.NotFoundError as error:
        assert "no_such_model" in str(error)
    else:
        raise AssertionError("an unknown model was served")


if __name__ == "__main__":
    main()
