"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from app.api import replies
from app.api.call import Call, make_reply_id, make_validator
from app.api.chunks import Chunks, stream
from app.api.constraint import Constraint, read_constraint
from app.api.context import ApiContext, Context
from app.api.errors import BadRequest
from app.api.fields import warn
from app.api.messages import has_tool_messages, read_messages, read_template_kwargs, write_as_text
from app.api.protocol import ChatRequest
from app.api.reasoning_parser import think_first
from app.api.request_info import RequestInfo
from app.api.sampling import chat_sampling
from app.api.sse import STREAMED, EventStream, unless_gone
from app.api.tools.calls import make_message
from app.api.tools.functions import read_functions
from app.api.tools.styles import TemplateFacts
from app.api.tools.use import ToolUse, combine, read_tools
from app.reasoning import TAIL_TOKENS, Thinking, find_thinking
from engine import CompletionOutput, RequestOutput, SamplingParams

router = APIRouter()
CALLS = ("tool_calls", "function_call")  # fields of a message
TOOLS_NOT_SHOWN = "the chat template knows no tools: with tool_choice auto the model was not shown them"


@router.post("/v1/chat/completions", responses=STREAMED)
async def create_chat_completion(body: ChatRequest, request: Request, context: Context) -> Response:
    """Answer a conversation, in one reply or as a stream."""
    call, echo = await prepare(body, request.state.info, context)
    if body.stream:
        chunks = Chunks(call, "chat.completion.chunk", is_chat=True)
        return EventStream(lambda emit: stream(chunks, lambda number, output: echo, emit))
    output = await unless_gone(request.receive, call.finish())
    return JSONResponse(whole_reply(call, output, echo))


async def prepare(
    body: ChatRequest, info: RequestInfo, context: ApiContext, id_prefix: str = "chatcmpl-"
) -> tuple[Call, str]:
    """Check everything that costs nothing, then render and tokenise off the loop.

    Returns the call, and the text that the reply begins with when the request asks for an echo.

    Raises:
        ApiError, InvalidRequest: the request cannot be served as asked.
    """
    model = info.model = context.check_model(body.model)
    context.require_ready()
    template = await context.read_template()
    is_older = body.functions is not None or body.function_call is not None
    body = read_functions(body) if is_older else body
    # The grammar of many tools takes milliseconds.
    tools = await asyncio.to_thread(find_tools, body, template) if body.tools else find_tools(body, template)
    if tools is None and body.tools and body.tool_choice != "none":
        warn(TOOLS_NOT_SHOWN)
    answer = read_constraint(body)
    if tools is not None:
        tools = replace(tools, calls_field="function_call" if is_older else "tool_calls")
        tools = await asyncio.to_thread(tools.in_style, template.tool_style, answer)
    constraint = combine(tools, answer)
    sampling = chat_sampling(body, constraint, await context.read_sampling_defaults())
    if tools is not None and tools.text_spec is not None:
        # The text shows the special tokens that begin a call; the grammar allows no others.
        sampling = replace(sampling, skip_special_tokens=False)
    messages = await read_conversation(body.messages, context, template)
    if body.add_special_tokens:
        message = "add_special_tokens is not supported here: the chat template writes them"
        raise BadRequest(message, "add_special_tokens", "unsupported_field")
    if body.continue_final_message and body.add_generation_prompt:
        raise BadRequest("continue_final_message needs add_generation_prompt=false", "continue_final_message")
    options = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        **read_template_kwargs(body.chat_template_kwargs, body.reasoning_effort),
    }
    prompt = await context.engine.render_chat(messages, **options, **show_tools(tools, template))
    tokenizer = context.engine.tokenizer
    assert tokenizer is not None, "the prompt was rendered"
    tail = tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
    thinking = find_thinking(template.supports_reasoning, tail, messages, options)
    if thinking is not None and thinking.has_channels and tools is not None and tools.spec is None:
        thinking = None  # the parser of the calls reads the channels
    wanted = constraint
    if thinking is not None:
        thinking = replace(thinking, is_shown=body.include_reasoning is not False)
        constraint, thinking, sampling = make_room(thinking, constraint, sampling, template)
    validator = make_validator(context, wanted, thinking, tools)
    echo = messages[-1]["content"] if body.echo and messages[-1]["role"] == "assistant" else ""
    reply_id = make_reply_id(id_prefix, info, body)
    prediction = None if body.prediction is None else body.prediction.text
    call = Call(
        context, info, body, reply_id, model, [prompt], sampling, constraint, tools, thinking, validator,
        prediction=prediction, prompt_field="messages",
    )  # fmt: skip
    return call, echo


def make_room(
    thinking: Thinking, constraint: Constraint | None, sampling: SamplingParams, template: TemplateFacts
) -> tuple[Constraint | None, Thinking, SamplingParams]:
    """Allow reasoning before an answer under a constraint."""
    if constraint is not None:
        constraint, thinking = think_first(constraint, thinking)
        sampling = replace(sampling, grammar=constraint.spec)
    if template.hides_reasoning or thinking.has_channels:
        sampling = replace(sampling, skip_special_tokens=False)
    return constraint, thinking, sampling


def find_tools(body: ChatRequest, template: TemplateFacts) -> ToolUse | None:
    """Return the tools that an answer may call.

    Where the chat template knows no tools, the model is not shown them: it answers a request that leaves the choice to
    it in text, and makes one call at a time where calls are forced, having no reason to end a list of them.

    Raises:
        ApiError: 400 for tools that are malformed.
    """
    tools = read_tools(body, template.knows_tools)
    return tools if tools is None or tools.spec is not None or template.knows_tools else None


async def read_conversation(
    given: list[dict[str, Any]], context: ApiContext, template: TemplateFacts
) -> list[dict[str, Any]]:
    """Return messages that the chat template can render: if it has no tools, calls and results become plain text.

    Raises:
        ApiError: 400 for a message that is malformed.
    """
    sees_images = context.engine.sees_images
    messages = read_messages(await context.documents.read(given, sees_images), sees_images)
    return messages if template.knows_tools or not has_tool_messages(messages) else write_as_text(messages)


def show_tools(tools: ToolUse | None, template: TemplateFacts) -> dict[str, Any]:
    """Return the chat template's argument for the tools."""
    return {"tools": tools.definitions} if tools is not None and template.knows_tools else {}


def whole_reply(call: Call, output: RequestOutput, echo: str) -> dict[str, Any]:
    """Return the chat.completion object."""
    choices, has_ids = [], call.body.return_token_ids
    for choice in output.outputs:
        message = read_message(call, choice, echo)
        entry: dict[str, Any] = {
            "index": choice.index,
            "message": {"reasoning": None, "reasoning_content": None} | message,
            "logprobs": replies.chat_logprobs(call, choice),
            "finish_reason": replies.finish_reason(choice, next((name for name in CALLS if name in message), None)),
            "stop_reason": choice.stop_reason,
            "token_ids": list(choice.token_ids) if has_ids else None,
        }
        choices.append(entry)
    reply = {
        **replies.header(call, "chat.completion"),
        "choices": choices,
        "usage": replies.usage_of(call, [output], replies.count_output([output])),
        "prompt_logprobs": replies.prompt_logprobs(call, output),
        "prompt_token_ids": output.prompt_token_ids if has_ids else None,
        "kv_transfer_params": None,
    }
    return reply | replies.extras(call, [output], range(len(choices)))


def read_message(call: Call, choice: CompletionOutput, echo: str) -> dict[str, Any]:
    """Return the message of one choice, with its reasoning and tool calls if there are any."""
    reader = call.make_reader()
    if reader is None:
        return {"role": "assistant", "content": echo + choice.text, "refusal": None}
    message = make_message(reader, choice.text, not replies.is_own_end(choice))
    return message | {"content": echo + (message["content"] or "")} if echo else message
