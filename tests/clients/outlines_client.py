"""outlines: its models for OpenAI's and for vLLM's servers; text, choices, schemas, a regex, a grammar."""

import json
from typing import Any, Literal

import openai
import outlines
from cases import MODEL, QUESTION, SCHEMA, Person, is_city, refused, run
from outlines.inputs import Chat
from outlines.types import CFG, JsonSchema, Regex

FACT = "Ada Lovelace was born in 1815 in London."
LIMITS: Any = {"max_tokens": 300, "temperature": 0}


class Outlines:
    def __init__(self, url: str, key: str) -> None:
        self._server: Any = {"base_url": f"{url}/v1", "api_key": key, "max_retries": 0}
        client = openai.OpenAI(**self._server)
        self._openai, self._vllm = outlines.from_openai(client, MODEL), outlines.from_vllm(client, MODEL)

    def text(self) -> None:
        assert self._openai(QUESTION, **LIMITS) == self._vllm(QUESTION, **LIMITS) != ""

    def stream(self) -> None:
        assert "".join(self._openai.stream(QUESTION, **LIMITS)) == self._openai(QUESTION, **LIMITS)

    def chat_and_samples(self) -> None:
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
        assert len(self._openai(Chat(turns), n=3, **LIMITS | {"temperature": 1})) == 3

    def model_class(self) -> None:
        for model in (self._openai, self._vllm):
            assert Person.model_validate_json(model(FACT, Person, **LIMITS))

    def json_schema(self) -> None:
        for model in (self._openai, self._vllm):
            assert is_city(model(QUESTION, JsonSchema(json.dumps(SCHEMA)), **LIMITS))

    def json_mode(self) -> None:
        assert isinstance(json.loads(self._openai(FACT, dict, **LIMITS)), dict)

    def choices_and_numbers(self) -> None:
        assert self._vllm(QUESTION, Literal["yes", "no"], **LIMITS) in ("yes", "no")
        assert str(int(self._vllm("How many?", int, max_tokens=30)))

    def regex(self) -> None:
        assert len(self._vllm(QUESTION, Regex("[a-f]{8}"), **LIMITS)) == 8

    def grammar(self) -> None:
        found = self._vllm(QUESTION, CFG('start: "x" ("+" "y")~2'), **LIMITS)
        assert found == "x+y+y"

    async def async_model(self) -> None:
        async with openai.AsyncOpenAI(**self._server) as client:
            model = outlines.from_vllm(client, MODEL)
            assert await model(QUESTION, Literal["yes", "no"], **LIMITS) in ("yes", "no")

    def unknown_model(self) -> None:
        error = refused(outlines.exceptions.OutlinesError, self._openai, QUESTION, model="no_such_model")
        assert "no_such_model" in str(error)


if __name__ == "__main__":
    run(Outlines)
