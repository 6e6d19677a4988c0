"""The requests of Ollama's API, and the fields of chat and text completions that they stand for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from app.api.context import ApiContext
from app.api.embeddings import MAX_INPUTS
from app.api.errors import BadRequest
from app.api.fields import VECTOR, warn
from app.api.protocol import MAX_MESSAGES, MAX_TOOLS, Fields, Integer, Strings
from app.api.wording import say_value
from app.reasoning import SWITCHES

Json = dict[str, Any]

SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
# field of a chat or text completion -> its name here
NAMES = {
    "max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty", "response_format": "format",
    "reasoning_effort": "think", **{name: f"options.{name}" for name in SAME},
}


class Options(Fields):
    """The sampling options; those of the runner, such as num_gpu, have no effect."""

    PLACE = ("options",)

    temperature: float | None = None
    top_k: Integer | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Integer | None = None
    stop: str | Strings | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Integer | None = None
    num_predict: Integer | None = None
    num_ctx: Integer | None = None

    def as_sampling(self, max_model_len: int) -> Json:
        """Return the fields of a chat or text completion."""
        found = {name: getattr(self, name) for name in SAME if getattr(self, name) is not None}
        if found.get("seed", 0) < 0:
            del found["seed"]  # a random one
        if self.repeat_penalty is not None:
            found["repetition_penalty"] = self.repeat_penalty
        if self.num_predict is not None and self.num_predict >= 0:  # -1 and -2 set no limit
            found["max_tokens"] = self.num_predict
        if self.repeat_last_n not in (None, -1):
            warn(f"options.repeat_last_n={self.repeat_last_n}: the penalties count the whole text")
        if self.num_ctx is not None and self.num_ctx > max_model_len:
            warn(f"options.num_ctx={self.num_ctx} is more than this server's {max_model_len} tokens")
        return found


class AnswerFields(Fields):
    """Common fields of chat and generate."""

    model: str
    stream: bool = True
    format: Any = None
    options: Options = Field(default_factory=Options)
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool = False
    top_logprobs: Integer | None = None

    def as_chat(self, context: ApiContext) -> Json:
        """Return the fields of a chat."""
        fields = self.as_completion(context) | {"logprobs": self.logprobs}
        if self.top_logprobs is not None:
            fields["top_logprobs"] = self.top_logprobs
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        elif self.think is not None:
            fields["chat_template_kwargs"] = dict.fromkeys(SWITCHES, self.think)
        return fields

    def as_completion(self, context: ApiContext) -> Json:
        """Return the fields that chat and text completions have under the same names."""
        fields = {"model": own_model(self.model, context), "stream": self.stream}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        elif self.format:
            raise BadRequest(f'format={say_value(self.format)} must be "json" or a JSON Schema', "format")
        return fields | self.options.as_sampling(context.engine.resolved.max_model_len)


class OllamaChat(AnswerFields):
    """POST /api/chat."""

    messages: Annotated[list[Json], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    tools: Annotated[list[Json], Field(max_length=MAX_TOOLS)] | None = None


class OllamaGenerate(AnswerFields):
    """POST /api/generate."""

    prompt: str = ""
    system: str = ""
    images: Annotated[list[str], Field(max_length=MAX_MESSAGES)] | None = None
    raw: bool = False


class EmbedFields(Fields):
    """The fields of both routes of vectors."""

    CONSTRAINTS = VECTOR

    model: str
    dimensions: Annotated[Integer, Field(ge=1)] | None = None
    truncate: bool = True
    options: Options = Field(default_factory=Options)


class OllamaEmbed(EmbedFields):
    """POST /api/embed."""

    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS)]


class OllamaEmbedPrompt(EmbedFields):
    """POST /api/embeddings."""

    prompt: str


class ModelName(Fields):
    """POST /api/show; `name` is the older field."""

    model: str | None = None
    name: str | None = None
    verbose: bool = False


class Pull(ModelName):
    """POST /api/pull."""

    stream: bool = True
    insecure: bool = False


def own_model(name: str, context: ApiContext) -> str:
    """Return the served name that is meant: Ollama's clients add a tag to names that have none."""
    return name if name in context.model_names else name.removesuffix(":latest")
