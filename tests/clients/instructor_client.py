"""instructor: a model class in its modes, partial objects, and lists."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Thing(BaseModel):
    """A thing that a text tells of."""

    # an open schema allows more properties, and a small model may go on with them for ever
    model_config = ConfigDict(extra="forbid")

    kind: Literal["person", "place"]
    name: str = Field(max_length=20)
    year: int = Field(ge=0, le=2100)


def main() -> None:
    url, key = sys.argv[1:]
    messages = [{"role": "user", "content": "Ada Lovelace was born in 1815."}]
    fields = {"model": "demo_model", "messages": messages, "temperature": 0, "max_tokens": 300}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key=key, max_retries=0), mode=mode)
        thing = client.chat.completions.create(response_model=Thing, max_retries=0, **fields)
        assert isinstance(thing, Thing), (mode, thing)
        *_, last = client.chat.completions.create_partial(response_model=Thing, max_retries=0, **fields)
        # not the same thing: its class has another name on the way, which the model reads
        assert Thing.model_validate(last.model_dump()), (mode, last)


if __name__ == "__main__":
    main()
