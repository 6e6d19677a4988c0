"""pydantic-ai: agents over chat completions, responses and messages; tools, and output in each of its modes."""

import base64
from typing import Any, Literal

from cases import MODEL, PIXEL, QUESTION, Person, refused, run
from pydantic_ai import Agent, BinaryContent, ModelHTTPError, UsageLimits
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.output import NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

FACT = "Ada Lovelace was born in 1815 in London."


def find_weather(city: Literal["Rome", "Oslo"]) -> str:
    """Find the weather."""
    return f"sunny in {city}"


class PydanticAI:
    def __init__(self, url: str, key: str) -> None:
        self._provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
        self._chat = OpenAIChatModel(MODEL, provider=self._provider)
        self._responses = OpenAIResponsesModel(MODEL, provider=self._provider)
        self._claude = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key=key))

    def _ask(self, text: str = QUESTION, model: Any = None, **more: Any) -> Any:
        settings: Any = {"max_tokens": 200, "temperature": 0}
        return Agent(model or self._chat, model_settings=settings, retries=2, **more).run_sync(text)

    def text_and_usage(self) -> None:
        result = self._ask(instructions="Be brief.")
        assert result.output and result.usage.output_tokens > 0

    async def stream(self) -> None:
        async with Agent(self._chat).run_stream(QUESTION) as result:
            pieces = [piece async for piece in result.stream_text(delta=True)]
        assert "".join(pieces)

    def history(self) -> None:
        agent = Agent(self._chat)
        first = agent.run_sync(QUESTION)
        assert agent.run_sync("And you?", message_history=first.all_messages()).output

    def tool_output(self) -> None:
        assert isinstance(self._ask(FACT, output_type=ToolOutput(Person)).output, Person)

    def native_output(self) -> None:
        assert isinstance(self._ask(FACT, output_type=NativeOutput(Person)).output, Person)

    def prompted_output(self) -> None:
        assert isinstance(self._ask(FACT, output_type=PromptedOutput(Person)).output, Person)

    def tools_auto(self) -> None:
        assert self._ask(tools=[find_weather]).output

    def tools_beside_tool_output(self) -> None:
        assert isinstance(self._ask(FACT, tools=[find_weather], output_type=Person).output, Person)

    def tools_beside_native_output(self) -> None:
        result = self._ask(FACT, tools=[find_weather], output_type=NativeOutput(Person))
        assert isinstance(result.output, Person)

    async def output_stream(self) -> None:
        async with Agent(self._chat, output_type=Person).run_stream(FACT) as result:
            assert isinstance(await result.get_output(), Person)

    def responses_model(self) -> None:
        assert self._ask(model=self._responses).output
        assert isinstance(self._ask(FACT, model=self._responses, output_type=Person).output, Person)

    def anthropic_model(self) -> None:
        assert self._ask(model=self._claude).output
        assert isinstance(self._ask(FACT, model=self._claude, output_type=Person).output, Person)

    def limits_and_errors(self) -> None:
        agent = Agent(self._chat)
        refused(UsageLimitExceeded, agent.run_sync, QUESTION, usage_limits=UsageLimits(output_tokens_limit=1))
        other = Agent(OpenAIChatModel("no_such_model", provider=self._provider))
        assert refused(ModelHTTPError, other.run_sync, QUESTION).status_code == 404
        image = BinaryContent(base64.b64decode(PIXEL), media_type="image/png")
        assert "image_url" in str(refused(ModelHTTPError, agent.run_sync, ["What is this?", image]))


if __name__ == "__main__":
    run(PydanticAI)
