"""The requests of the API as pydantic models: names and types; ranges are checked by SamplingParams."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema

from app.api.errors import BadRequest, describe_fields, refuse
from app.api.fields import ANSWER, Values, check_unknown
from app.api.wording import Path, say_value

MAX_IDS = 1024
MAX_MESSAGES = 4096
MESSAGES_HELP = (
    "role and content: a text or parts, {type: text, text} and, of users to a model that sees images, "
    "{type: image_url, image_url: {url: data:image/png;base64,...}}; PNG, JPEG or WebP up to 16 megapixels"
)
# Fields of chat completions that /v1/messages and /v1/responses take under the same names.
SHARED = frozenset([
    "allowed_token_ids", "bad_words", "cache_salt", "chat_template_kwargs", "deadline_s", "frequency_penalty",
    "ignore_eos", "include_reasoning", "include_stop_str_in_output", "logit_bias", "min_p", "min_tokens", "prediction",
    "presence_penalty", "priority", "repetition_penalty", "request_id", "seed",
    "skip_special_tokens", "stop_token_ids", "structured_outputs",
])
MAX_PROMPTS = 1024  # as many as choices
MAX_TOOLS = 1024


def read_whole(value: Any) -> Any:
    """Return 2.0 as 2, which JSON Schema calls an integer; any other value as it is."""
    return int(value) if type(value) is float and value.is_integer() else value


def read_all_whole(values: Any) -> Any:
    is_mixed = isinstance(values, list) and float in set(map(type, values))
    return [*map(read_whole, values)] if is_mixed else values


Integer = Annotated[int, BeforeValidator(read_whole)]
Integers = Annotated[list[int], BeforeValidator(read_all_whole)]
TokenIds = Annotated[Integers, Field(max_length=MAX_IDS)]
Strings = Annotated[list[str], Field(max_length=MAX_IDS)]
# the chat template decides what a level means; "none" turns reasoning off
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def read_text(where: Path, value: object) -> str:
    if not isinstance(value, str):
        raise refuse(where, " must be a text")
    return value


def check_choice(where: Path, value: object, allowed: Collection[str]) -> None:
    """Reject a value that is not one of the allowed texts."""
    if not isinstance(value, str) or value not in allowed:
        raise refuse(where, f"={say_value(value)} must be one of {', '.join(allowed)}")


def stop_early(schema: Any) -> None:
    """Let the validation of lists and objects end at the first wrong item: 190,000 errors take a second."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for inner in schema.values():
            stop_early(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            stop_early(inner)


class Fields(BaseModel):
    """Fields of a request, or of an object within one; optional fields accept null.

    Attributes:
        PLACE: where the request has the object; empty for the request itself.
        PASSED: fields of other routes that the route accepts and reads from model_extra.
        CONSTRAINTS: the unknown fields that are refused, see `fields.py`.
    """

    # strict: "0.7" is not a number and true is not an integer
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")
    PLACE: ClassVar[Path] = ()
    PASSED: ClassVar[frozenset[str]] = frozenset()
    CONSTRAINTS: ClassVar[Mapping[str, Values] | None] = ANSWER

    @classmethod
    def read(cls, given: Any, names: Mapping[str, str] | None = None) -> Self:
        """Validate fields that another route has translated, or that came in a batch.

        Args:
            names: the fields that have another name on that route.

        Raises ApiError: 400 that names the field.
        """
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise describe_fields(error.errors(), names) from error

    @classmethod
    def list_names(cls) -> frozenset[str]:
        """Return the names of the fields as the request has them."""
        return cls.PASSED | {field.alias or name for name, field in cls.model_fields.items()}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler, /) -> CoreSchema:
        schema = handler(source)
        stop_early(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        optional = {field.alias or name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name not in optional}

    @model_validator(mode="after")
    def check_extra(self) -> Self:
        """Refuse or leave out the fields that are not defined here."""
        if self.model_extra:
            check_unknown(self.model_extra, self.list_names(), self.PLACE, self.CONSTRAINTS)
        return self


class StreamOptions(Fields):
    """Options of a stream. include_obfuscation is accepted and ignored."""

    PLACE = ("stream_options",)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchemaFormat(Fields):
    """The schema of a response_format; `strict` has no effect because a schema is always enforced."""

    PLACE = ("response_format", "json_schema")

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """OpenAI's response_format."""

    PLACE = ("response_format",)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")  # llama.cpp's name
    # format of a structural tag: the newer one, or the two older ones
    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None


class StructuredOutputs(Fields):
    """vLLM's structured_outputs: one constraint and its options."""

    PLACE = ("structured_outputs",)
    CONSTRAINTS = None

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=16384)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    csv: dict[str, Any] | None = None
    xml: dict[str, Any] | None = None
    structural_tag: str | dict[str, Any] | None = None
    property_order: Literal["schema", "any"] | None = None
    backend: str | None = None
    whitespace: Literal["spaced", "compact", "any"] | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool = False  # no fallback exists: a grammar is enforced or refused
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class PredictedText(Fields):
    """One text of a prediction."""

    PLACE = ("prediction", "content")

    type: Literal["text"]
    text: str


class Prediction(Fields):
    """OpenAI's prediction: text that the answer probably contains, used as drafts."""

    PLACE = ("prediction",)

    type: Literal["content"]
    content: str | Annotated[list[PredictedText], Field(max_length=MAX_IDS)]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class GenerationFields(Fields):
    """Common fields of chat and text completions."""

    model: str | None = None
    n: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Integer | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_IDS)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    prompt_logprobs: Integer | None = None
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    echo: bool | None = False

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=16384)] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None

    priority: Integer = Field(default=0, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    request_id: str | None = Field(default=None, min_length=1, max_length=128, pattern=r"^[\w.:-]+$")
    deadline_s: float | None = Field(default=None, gt=0, le=86400)
    kv_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="after")
    def check_fields(self) -> Self:
        """Reject stream options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream=true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats


class ChatFields(GenerationFields):
    """The fields of a chat that all APIs have in some form, beside messages and tools."""

    max_completion_tokens: Integer | None = None
    logprobs: bool | None = False
    top_logprobs: Integer | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = True
    reasoning_effort: ReasoningEffort | None = None
    prediction: Prediction | None = None


class OtherReasoning(Fields):
    """OpenRouter's reasoning fields. `max_tokens` has no effect: no model here takes a target length."""

    PLACE = ("reasoning",)

    effort: ReasoningEffort | None = None
    enabled: bool | None = None
    exclude: bool = False
    max_tokens: Integer | None = None


class OtherThinking(Fields):
    """DeepSeek's, Z.ai's and Moonshot's servers turn reasoning on and off by these fields."""

    PLACE = ("thinking",)

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Integer | None = None


class ChatRequest(ChatFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES, description=MESSAGES_HELP)]
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    # Other servers' names for the reasoning effort and for turning reasoning on, see `read_reasoning`
    reasoning: OtherReasoning | None = None
    thinking: bool | OtherThinking | None = None
    enable_thinking: bool | None = None
    functions: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    function_call: str | dict[str, Any] | None = None

    @property
    def has_functions(self) -> bool:
        """Whether it has OpenAI's older form of tools, whose calls come one at a time."""
        return self.functions is not None or self.function_call is not None


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Any
    logprobs: Integer | None = None
    best_of: Integer | None = None


class TokenizeRequest(Fields):
    """POST /tokenize: a prompt with the fields of a text completion, or messages with those of a chat."""

    PASSED = frozenset(ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys())

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[Integers, Field(max_length=2**20)]
