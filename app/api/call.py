"""Call: a validated request, independent of the route that received it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from app.api.answer_validator import AnswerValidator
from app.api.constraint import Constraint
from app.api.context import ApiContext
from app.api.errors import BadRequest, make_closing_error, make_failure, to_api_error
from app.api.protocol import MAX_PROMPTS, GenerationFields
from app.api.reasoning_parser import make_reader
from app.api.request_info import RequestInfo
from app.api.tools.calls import ToolParser, is_valid
from app.api.tools.use import ToolUse, explain
from app.concurrency import take_last
from app.reasoning import Thinking
from engine import EngineDead, InvalidRequest, RequestOutput, SamplingParams
from grammar import GrammarError

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Call:
    """A validated request: prompts, sampling, and the ids and names that its reply carries.

    Attributes:
        given: the prompts as the request has them, for a reply that repeats them.
        prompt_field: the field that holds the prompts, for errors.
        prediction: text that the answer probably contains.
        validator: validator of finished choices; None if there is nothing to validate.
    """

    context: ApiContext
    info: RequestInfo
    body: GenerationFields
    reply_id: str
    model: str
    prompts: list[Prompt]
    sampling: SamplingParams
    constraint: Constraint | None = None
    tools: ToolUse | None = None
    thinking: Thinking | None = None
    validator: AnswerValidator | None = None
    given: Sequence[Prompt] = ()
    prediction: str | None = None
    prompt_field: str = "prompt"
    created: int = field(default_factory=lambda: int(time.time()))

    async def generate(self, index: int = 0) -> AsyncGenerator[RequestOutput]:
        """Run one of the prompts; closing the generator aborts it in the engine.

        Raises:
            ApiError: the request's grammar turned out to be unusable, or the server closes.
            EngineError: as `Engine.generate` does.
        """
        request_id = self.reply_id if len(self.prompts) == 1 else _number(self.reply_id, index)
        prompt = self.prompts[index]
        if not isinstance(prompt, str):
            self.info.prompts[request_id] = (len(prompt), 0)
        is_finished = False
        self.context.open_requests.add(request_id)
        outputs = self.context.engine.generate(
            prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt},
            self.sampling,
            request_id,
            priority=self.body.priority,
            cache_salt=self.body.cache_salt,
            deadline_s=self.body.deadline_s,
            prediction=self.prediction,
            lora_request=self.context.select_adapter(self.model),
        )
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self.info.note(output)
                    _check(output)
                    if self.validator is not None:
                        for choice in output.outputs:
                            await self.validator.take(index * self.sampling.n + choice.index, choice)
                    is_finished = output.finished
                    yield output
        except (asyncio.CancelledError, GeneratorExit):
            if not is_finished:
                self.info.finish_reasons.append("abort")
            raise
        except EngineDead as error:
            if self.context.engine.state != "closed":
                raise
            self.info.finish_reasons.append("abort")
            raise make_closing_error() from error
        except GrammarError as error:
            param = None if self.constraint is None else self.constraint.param
            if self.tools is not None and param == "tools":
                raise explain(error, self.tools) from error
            raise to_api_error(error, param) from error
        except InvalidRequest as error:
            if error.param == "prompt":
                place = f"prompt[{index}]: " if len(self.prompts) > 1 else ""
                raise type(error)(f"{place}{error}", self.prompt_field) from error
            if error.param != "grammar" or self.constraint is None:
                raise
            # the engine reports a slow compile under its own parameter name; use this API's field
            raise BadRequest(str(error), self.constraint.param, "invalid_grammar") from error
        finally:
            self.context.open_requests.discard(request_id)

    async def finish(self, index: int = 0) -> RequestOutput:
        """Run one of the prompts to its end and return the last output."""
        return await take_last(self.generate(index))

    def make_reader(self) -> ToolParser | None:
        """Return the parser that separates reasoning, content and tool calls; None if all of a choice is content."""
        return make_reader(self.tools, self.thinking)


def make_validator(
    context: ApiContext,
    constraint: Constraint | None,
    thinking: Thinking | None = None,
    tools: ToolUse | None = None,
) -> AnswerValidator | None:
    """Return the validator of a request's choices, None if there is nothing to validate.

    Args:
        constraint: constraint of the content, without reasoning.
    """
    tokenizer = context.engine.tokenizer
    if tokenizer is None or (constraint is None and thinking is None):
        return None
    spec = None if constraint is None else constraint.spec
    check = None if tools is None or not (tools.spec or tools.answer) else partial(is_valid, tools)
    return AnswerValidator(spec, thinking, lambda ids: tokenizer.decode(ids, skip_special_tokens=False), check)


def _check(output: RequestOutput) -> None:
    """Raise the error of a completion that failed in the engine: its text is not an answer."""
    for completion in output.outputs:
        if completion.finish_reason in ("error", "dead_end"):
            raise make_failure(completion)


def make_reply_id(prefix: str, info: RequestInfo, body: GenerationFields) -> str:
    """Return the id of the reply: the client's request_id, or the one of the x-request-id header."""
    given = body.request_id or info.request_id
    # Two live requests must not share an id, and a client may send the same header twice.
    return f"{prefix}{given}-{uuid.uuid4().hex[:8]}"


def list_request_ids(reply_id: str) -> list[str]:
    """Return every engine id of a reply's prompts: its own id, or a numbered one for each of several prompts."""
    return [reply_id, *(_number(reply_id, index) for index in range(MAX_PROMPTS))]


def _number(reply_id: str, index: int) -> str:
    return f"{reply_id}-{index}"
