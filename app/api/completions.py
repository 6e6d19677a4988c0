"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from app.api.call import Call, Choice, Delta, floor, make_reply_id
from app.api.chat import ReplyWriter
from app.api.context import ApiContext, Context, JsonRoute
from app.api.errors import BadRequest
from app.api.gate import RequestInfo
from app.api.protocol import CompletionRequest
from app.api.sampling import Names, completion_sampling, read_constraint, read_prompts
from app.api.sse import STREAMED, EventStream, unless_gone
from app.api.tokens import encode, require_tokenizer
from app.api.tools.styled_calls import Piece
from engine import Logprob, RequestOutput, Tokenizer, TokenLogprobs

Json = dict[str, Any]

router = APIRouter(route_class=JsonRoute)
MAX_CHOICES = 1024
SEPARATOR = "<|endoftext|>"  # GPT-2's, Qwen's and SmolLM's name for it


@router.post("/v1/completions", responses=STREAMED)
async def create_completion(body: CompletionRequest, request: Request, context: Context) -> Response:
    """Continue one text or several, in one piece or as a stream."""
    writer = TextWriter(await prepare(body, request.state.info, context))
    if body.stream:
        return EventStream(writer.stream)
    return JSONResponse(await unless_gone(request.receive, writer.finish()))


async def prepare(body: CompletionRequest, info: RequestInfo, context: ApiContext, names: Names | None = None) -> Call:
    """Check the request and tokenise its prompts off the loop.

    Args:
        names: the fields that have another name on the route.

    Raises ApiError, InvalidRequest: the request cannot be served as asked.
    """
    model = info.model = context.check_model(body.model)
    context.require_ready()
    names = names or {}
    constraint = read_constraint(body, names)
    sampling = completion_sampling(body, constraint, context.sampling_defaults, names)
    info.counts_output = body.max_tokens != 0
    if body.best_of not in (None, 1, sampling.n):
        message = f"best_of={body.best_of} must be n={sampling.n}: every text that is drawn is in the reply"
        raise BadRequest(message[:200], "best_of", "unsupported_field")
    given = prompts = read_prompts(_new_document(context) if body.prompt is None else body.prompt)
    if len(prompts) * sampling.n > MAX_CHOICES:
        message = f"{len(prompts)} prompts with n={sampling.n} are more than {MAX_CHOICES} choices"
        raise BadRequest(message, "n")
    if body.add_special_tokens is False:
        prompts = [p if isinstance(p, list) else await encode(p, context, False) for p in prompts]
    reply_id = make_reply_id("cmpl-", info, body)
    answer = None if constraint is None else constraint.spec
    return Call(context, info, body, reply_id, model, prompts, sampling, constraint, answer, given=given, names=names)


def _new_document(context: ApiContext) -> list[int]:
    """The prompt of a request without one: what stands before the first word of a document."""
    tokenizer = require_tokenizer(context)
    if ids := tokenizer.encode(""):
        return ids
    # models that mark no beginning know what stands between two documents
    between = tokenizer.encode(SEPARATOR, add_special_tokens=False)
    known = [tokenizer.bos_token_id, *(between if len(between) == 1 else ()), *tokenizer.eos_token_ids]
    for token_id in known:
        if token_id is not None:
            return [token_id]
    raise BadRequest("prompt must not be null: this model has no token that begins a document", "prompt")


class TextWriter(ReplyWriter):
    """Writes a text completion; choices are numbered through all prompts."""

    NAMES = ("text_completion", "text_completion", "text")

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._offsets: dict[int, TextOffsets] = {}

    def write_content(self, pieces: Iterable[Piece], is_whole: bool = False) -> str:
        return "".join(piece.text for piece in pieces)

    def write_first(self, index: int, output: RequestOutput) -> Json | None:
        echo = self._read_echo(index, output)
        logprobs = self._begin_logprobs(index, output, echo)
        return self._entry(index, echo) | {"logprobs": logprobs} if echo else None

    def write_logprobs(self, delta: Delta) -> Json | None:
        return self._write_logprobs(delta.choice.index, delta.gained.token_ids, delta.gained.logprobs)

    def write_choice(self, choice: Choice) -> Json:
        output, has_ids = choice.output, self.call.body.return_token_ids
        echo = self._read_echo(choice.index, output)
        before = self._begin_logprobs(choice.index, output, echo)
        logprobs = self._write_logprobs(choice.index, choice.token_ids, choice.logprobs)
        if before is not None and logprobs is not None:
            logprobs = {name: before[name] + logprobs[name] for name in logprobs}
        return {
            "index": choice.index, "text": echo + choice.read("content"), "logprobs": logprobs,
            "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason,
            "prompt_logprobs": self.call.describe_prompt(output),
            "token_ids": choice.token_ids if has_ids else None,
            "prompt_token_ids": output.prompt_token_ids if has_ids else None,
        }

    def _read_echo(self, index: int, output: RequestOutput) -> str:
        """Return the prompt of a choice if the reply repeats it, as it was written; of token ids, the full text."""
        if not self.call.body.echo:
            return ""
        given = self.call.given[index // self.call.sampling.n]
        if isinstance(given, str):
            return given
        tokenizer = self.call.context.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _begin_logprobs(self, index: int, output: RequestOutput, echo: str) -> Json | None:
        """Begin to count offsets, and return the log probabilities of a prompt that the reply repeats."""
        sampling, tokenizer = self.call.sampling, self.call.context.engine.tokenizer
        if sampling.logprobs is None:
            return None
        ids = output.prompt_token_ids
        self._offsets[index] = TextOffsets(tokenizer, ids, sampling.skip_special_tokens, len(echo))
        if not self.call.body.echo or output.prompt_logprobs is None:
            return None
        return describe_positions(self.call, output.prompt_logprobs, ids, TextOffsets(tokenizer).take(ids, echo))

    def _write_logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
    ) -> Json | None:
        if logprobs is None or index not in self._offsets:
            return None
        return describe_positions(self.call, logprobs, token_ids, self._offsets[index].take(token_ids))


def describe_positions(
    call: Call, positions: Sequence[TokenLogprobs | None], ids: Sequence[int], offsets: Sequence[int]
) -> Json:
    """Return log probabilities in the older format: four lists. The first token of a prompt has no probability.

    Args:
        offsets: where each token begins in the choice's text.
    """
    places = zip(positions, ids, offsets, strict=False)
    known = [(_first(call, token_id) if p is None else p.token, offset) for p, token_id, offset in places]
    return {
        "tokens": [_name_token(call, token) for token, _ in known],
        "token_logprobs": [None if p is None else floor(p.token.logprob) for p in positions],
        "top_logprobs": [None if p is None else _top(call, p) for p in positions],
        "text_offset": [offset for _, offset in known],
    }


def _top(call: Call, position: TokenLogprobs) -> dict[str, float]:
    """Return the token and its alternatives by name; one whose name is taken is named by its id."""
    found: dict[str, float] = {}
    for entry in {entry.token_id: entry for entry in (position.token, *position.top)}.values():
        name = _name_token(call, entry)
        found[f"token_id:{entry.token_id}" if name in found else name] = floor(entry.logprob)
    return found


def _name_token(call: Call, entry: Logprob) -> str:
    r"""Return a token in the older format, which has no list of bytes: a part of a character is bytes:\xf0\x9f."""
    if entry.part is None or entry.decoded_token.isascii() or call.body.return_tokens_as_token_ids:
        return call.name_token(entry)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.part)


def _first(call: Call, token_id: int) -> Logprob:
    """Return the first token of a prompt, of which only the text is known."""
    tokenizer = call.context.engine.tokenizer
    piece = "" if tokenizer is None else tokenizer.token_piece(token_id)
    if isinstance(piece, str):
        return Logprob(token_id, 0.0, 0, piece)
    return Logprob(token_id, 0.0, 0, piece.decode(errors="replace"), part=piece)


class TextOffsets:
    """Counts the offsets of tokens, which may come in pieces, in the text that clients see.

    The bytes of one character share its offset. A token that shows nothing, such as a special token, has the offset of
    the next one. A stop string that the text leaves out is counted, so that streams and whole replies agree.

    Args:
        tokenizer: None puts every token at the start.
        start: how much text stands before the tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True,
        start: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._text = None if tokenizer is None else tokenizer.make_text(prompt_token_ids, skip_special_tokens)
        self._place = start

    def take(self, token_ids: Iterable[int], echo: str | None = None) -> list[int]:
        """Return the places of the next tokens; those of a prompt are in the text that repeats it."""
        places = []
        for token_id in token_ids:
            places.append(self._place if echo is None else min(self._place, len(echo)))
            if self._text is None or self._tokenizer is None:
                continue
            shown = self._text.feed_token(token_id)
            if echo is not None and not shown:
                # a special token shows only where the client has written it out
                piece = self._tokenizer.token_piece(token_id)
                shown = piece if isinstance(piece, str) and echo.startswith(piece, self._place) else ""
            self._place += len(shown)
        return places
