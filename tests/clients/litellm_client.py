"""litellm: OpenAI's and Anthropic's routes, streams, tools, text, responses, embeddings, and errors by their class."""

import os
from typing import Any

# its table of prices would come from the network
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from cases import ASK, MODEL, NAMED, PIXEL, QUESTION, SHAPE, TOOLS, is_city, refused, run


class Litellm:
    def __init__(self, url: str, key: str) -> None:
        litellm.telemetry = False
        self._site = url
        self._server: Any = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": key}
        self._server |= {"num_retries": 0}
        self._fields = self._server | {"messages": ASK, "temperature": 0, "max_tokens": 60}

    def _ask(self, **more: Any) -> Any:
        return litellm.completion(**self._fields | more)

    def completion_and_usage(self) -> None:
        reply = self._ask()
        assert reply.choices[0].message.content and reply.usage.completion_tokens > 0

    def stream_and_usage(self) -> None:
        chunks = list(self._ask(stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == self._ask().choices[0].message.content
        assert any(getattr(chunk, "usage", None) for chunk in chunks)

    def json_schema(self) -> None:
        assert is_city(self._ask(response_format=SHAPE).choices[0].message.content)

    def tools_auto(self) -> None:
        assert self._ask(tools=TOOLS, tool_choice="auto").choices[0].message

    def tools_required_and_named(self) -> None:
        for choice in ("required", NAMED):
            called = self._ask(tools=TOOLS, tool_choice=choice).choices[0]
            assert is_city(called.message.tool_calls[0].function.arguments)
            assert called.finish_reason == "tool_calls"

    def text_completion(self) -> None:
        fields = self._server | {"model": f"text-completion-openai/{MODEL}"}
        assert litellm.text_completion(**fields, prompt="Ada", max_tokens=8).choices[0].text

    def vllm_route(self) -> None:
        reply = self._ask(model=f"hosted_vllm/{MODEL}", structured_outputs={"choice": ["yes", "no"]})
        assert reply.choices[0].message.content in ("yes", "no")

    def anthropic_route(self) -> None:
        reply = self._ask(model=f"anthropic/{MODEL}", api_base=self._site)
        assert reply.choices[0].message.content

    def responses(self) -> None:
        reply = litellm.responses(**self._server, input=QUESTION, max_output_tokens=60)
        assert reply.output[0].content[0].text

    def embedding(self) -> None:
        found = litellm.embedding(**self._server, input=["a cat"], encoding_format="float")
        assert len(found.data[0]["embedding"]) == 256

    async def async_completion(self) -> None:
        reply = await litellm.acompletion(**self._server, messages=ASK, max_tokens=20)
        assert reply.choices[0].message.content

    def image_is_refused_by_name(self) -> None:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        turns = [{"role": "user", "content": [image]}]
        assert "image_url" in str(refused(litellm.BadRequestError, self._ask, messages=turns))

    def errors_by_class(self) -> None:
        refused(litellm.NotFoundError, self._ask, model="openai/no_such_model")
        refused(litellm.AuthenticationError, self._ask, api_key="wrong")
        refused(litellm.BadRequestError, self._ask, top_p=7)
        long = [{"role": "user", "content": "word " * 5000}]
        refused(litellm.ContextWindowExceededError, self._ask, messages=long)
        refused(litellm.Timeout, self._ask, max_tokens=1900, extra_body={"ignore_eos": True}, timeout=0.1)


if __name__ == "__main__":
    run(Litellm)
