"""litellm: chat, stream, JSON schema, a forced tool, text completion, and errors by their class."""

import json
import os
import sys

# its table of prices would come from the network
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

CITY = {"city": {"enum": ["Rome", "Oslo"]}}
SCHEMA = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}


def main() -> None:
    url, key = sys.argv[1:]
    litellm.telemetry = False
    messages = [{"role": "user", "content": "Hello! Who are you?"}]
    settings = {"model": "openai/demo_model", "api_base": url, "api_key": key, "num_retries": 0}
    fields = {**settings, "messages": messages, "temperature": 0, "max_tokens": 60}
    reply = litellm.completion(**fields)
    text = reply.choices[0].message.content
    assert text and reply.usage.completion_tokens > 0, reply
    chunks = list(litellm.completion(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    form = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA, "strict": True}}
    record = litellm.completion(**fields, response_format=form).choices[0].message.content
    assert json.loads(record)["city"] in ("Rome", "Oslo"), record
    tool = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
    choice = {"type": "function", "function": {"name": "go"}}
    called = litellm.completion(**fields, tools=[tool], tool_choice=choice).choices[0]
    assert json.loads(called.message.tool_calls[0].function.arguments)["city"], called
    assert called.finish_reason == "tool_calls"
    plain = {**settings, "model": "text-completion-openai/demo_model"}
    assert litellm.text_completion(**plain, prompt="Ada", max_tokens=8).choices[0].text
    for name, value, error in (
        ("model", "openai/no_such_model", litellm.NotFoundError),
        ("api_key", "wrong", litellm.AuthenticationError),
        ("top_p", 7, litellm.BadRequestError),
    ):
        try:
            litellm.completion(**fields | {name: value})
        except error:
            continue
        raise AssertionError(f"{name}={value} was served")


if __name__ == "__main__":
    main()
