"""instructor: a model class in each of its modes, partial objects, lists, parallel tools, validation with retries."""

from collections.abc import Iterable
from typing import Any

import anthropic
import instructor
import openai
from cases import FACT, MODEL, Person, run
from instructor import Mode
from instructor.v2.core.errors import InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field, field_validator


class Short(BaseModel):
    """A name of a person."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)

    @field_validator("name")
    @classmethod
    def check_name(cls, name: str) -> str:
        if len(name) > 2:
            raise ValueError("must be initials")
        return name


class Instructor:
    def __init__(self, url: str, key: str) -> None:
        self._openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        self._claude = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
        self._fields: Any = {"model": MODEL, "messages": FACT, "max_tokens": 400, "max_retries": 0, "temperature": 0}

    def _check(self, mode: Mode) -> None:
        client = instructor.from_openai(self._openai, mode=mode)
        assert isinstance(client.chat.completions.create(response_model=Person, **self._fields), Person)

    def tools(self) -> None:
        self._check(Mode.TOOLS)

    def tools_strict(self) -> None:
        self._check(Mode.TOOLS_STRICT)

    def json_schema(self) -> None:
        self._check(Mode.JSON_SCHEMA)

    def json(self) -> None:
        """The server sees response_format json_object; the schema is in the prompt only."""
        self._check(Mode.JSON)

    def md_json(self) -> None:
        """The server sees a prompt only."""
        self._check(Mode.MD_JSON)

    def responses_tools(self) -> None:
        client = instructor.from_openai(self._openai, mode=Mode.RESPONSES_TOOLS)
        person = client.responses.create(
            model=MODEL, input=FACT, response_model=Person, max_retries=0, max_output_tokens=400
        )
        assert isinstance(person, Person)

    def parallel_tools(self) -> None:
        client = instructor.from_openai(self._openai, mode=Mode.PARALLEL_TOOLS)
        found = client.chat.completions.create(response_model=Iterable[Person], **self._fields)
        assert all(isinstance(each, Person) for each in found)

    def partial(self) -> None:
        for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
            client = instructor.from_openai(self._openai, mode=mode)
            *_, last = client.chat.completions.create_partial(response_model=Person, **self._fields)
            assert Person.model_validate(last.model_dump()), mode

    def iterable(self) -> None:
        client = instructor.from_openai(self._openai, mode=Mode.TOOLS)
        found = list(client.chat.completions.create_iterable(response_model=Person, **self._fields))
        assert all(isinstance(each, Person) for each in found)

    def failed_validation_is_asked_again(self) -> None:
        """The model sees what was wrong; whether it learns from that is not asked here."""
        client, tries = instructor.from_openai(self._openai, mode=Mode.TOOLS), []
        client.on("completion:response", tries.append)
        try:
            client.chat.completions.create(response_model=Short, **self._fields | {"max_retries": 2})
        except InstructorRetryException:
            assert len(tries) > 1
        assert tries

    def claude_tools(self) -> None:
        client = instructor.from_anthropic(self._claude, mode=Mode.ANTHROPIC_TOOLS)
        fields = {name: value for name, value in self._fields.items() if name != "temperature"}
        assert isinstance(client.messages.create(response_model=Person, **fields), Person)

    async def async_tools(self) -> None:
        client = instructor.from_openai(
            openai.AsyncOpenAI(base_url=self._openai.base_url, api_key=self._openai.api_key)
        )
        assert isinstance(await client.chat.completions.create(response_model=Person, **self._fields), Person)


if __name__ == "__main__":
    run(Instructor)
