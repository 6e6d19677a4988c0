"""llama-index: chat, completion, streams, tools, an agent, structured output, embeddings."""

from typing import Any, Literal

from cases import MODEL, QUESTION, Person, is_city, run
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

FACT = "Ada Lovelace was born in 1815 in London."


def find_weather(city: Literal["Rome", "Oslo"]) -> str:
    """Find the weather."""
    return f"sunny in {city}"


class LlamaIndex:
    def __init__(self, url: str, key: str) -> None:
        self._server: Any = {"api_base": f"{url}/v1", "api_key": key, "max_retries": 0}
        settings: Any = {"model": MODEL, "context_window": 2048, "max_tokens": 120, "temperature": 0}
        settings |= self._server | {"is_function_calling_model": True}
        self._chat = OpenAILike(**settings, is_chat_model=True, should_use_structured_outputs=True)
        self._text = OpenAILike(**settings, is_chat_model=False)
        self._tool = FunctionTool.from_defaults(find_weather)
        self._turns = [ChatMessage(role="user", content=QUESTION)]

    def chat_and_stream(self) -> None:
        *_, last = self._chat.stream_chat(self._turns)
        assert last.message.content == self._chat.chat(self._turns).message.content

    def complete_and_stream(self) -> None:
        *_, last = self._text.stream_complete("Once")
        assert last.text == self._text.complete("Once").text

    async def async_chat(self) -> None:
        assert (await self._chat.achat(self._turns)).message.content
        assert (await self._text.acomplete("Once")).text

    def tools_required(self) -> None:
        reply = self._chat.chat_with_tools([self._tool], QUESTION, tool_required=True)
        (call,) = self._chat.get_tool_calls_from_response(reply)
        assert is_city(call.tool_kwargs)

    def tools_auto(self) -> None:
        assert self._chat.chat_with_tools([self._tool], QUESTION).message.content

    def predict_and_call(self) -> None:
        assert self._chat.predict_and_call([self._tool], QUESTION).sources

    async def agent(self) -> None:
        assert str(await FunctionAgent(tools=[self._tool], llm=self._chat).run(QUESTION))

    def structured_output(self) -> None:
        assert isinstance(self._chat.as_structured_llm(Person).complete(FACT).raw, Person)

    def embeddings(self) -> None:
        embedder = OpenAILikeEmbedding(model_name=MODEL, **self._server)
        assert len(embedder.get_text_embedding("a cat")) == 256


if __name__ == "__main__":
    run(LlamaIndex)
