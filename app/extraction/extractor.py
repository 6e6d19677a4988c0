"""Extractor: one text and one JSON Schema in, one checked record out, streamed while it is written.

messages -> engine with the (bounded) schema as grammar -> JSON text
         -> independent validation against the user's own schema -> confidence and evidence of each value
         -> checks and flags
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from app.concurrency import take_last
from app.extraction.bounds import BoundedSchema, Limits, add_bounds
from app.extraction.calibration import FILE_NAME
from app.extraction.checks import read_checks, run_checks
from app.extraction.confidence import field_confidence, score_tokens
from app.extraction.cuts import list_cuts
from app.extraction.flags import LOOPED, LOW_CONFIDENCE, find_flags
from app.extraction.grounding import find_evidence
from app.extraction.json_spans import Leaf, Scan, scan
from app.extraction.loops import LoopWatch, find_copies
from app.extraction.prompt import Example, Schema, make_messages, make_plain_prompt
from app.extraction.result import ExtractionResult, PartialExtraction, Usage
from app.extraction.verbatim import GROUNDED, GroundedSchema, list_spellings, mark_grounded
from app.reasoning import CLOSE, FINAL, prepare_prompt
from engine import (
    CompletionOutput,
    Engine,
    InvalidRequest,
    LoRARequest,
    PromptTooLong,
    RequestOutput,
    SamplingParams,
)
from grammar import GrammarError, GrammarSpec, SchemaValidator, UnsupportedGrammar

DEFAULT_LIMITS = Limits()
DEFAULT_MAX_TOKENS = 1024
# Minimum number of tokens left for a record.
MIN_OUTPUT_TOKENS = 32
TOO_LARGE = "a number is larger than a double holds"
VERBATIM = "a verbatim text (option ground)"
VERBATIM_IMAGES = "verbatim texts must be parts of a text, and an image has none: switch it off or send text only"
WITHOUT_LIMITS = "with the added limits nothing satisfies the schema: read without them"


class TextTooLong(InvalidRequest):
    """Text and schema leave too few tokens for a record; the message gives the counts."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A schema as it is enforced for one text; notes say which of the added limits do not hold."""

    bounds: BoundedSchema
    grammar: GrammarSpec
    has_lists: bool
    notes: tuple[str, ...]


@dataclass(slots=True)
class Extractor:
    """Turns texts into records on one engine.

    Attributes:
        limits: lengths of open strings and lists; None adds none.
        ground: whether free strings have to be parts of the text, and dates and numbers those that stand in
            it; an empty text grounds nothing.
        property_order: "schema" writes properties in the schema's order, "any" lets the model choose.
        instructions: the user's description of the task; it follows the system prompt.
        examples: texts with their right records.
        lora_request: the adapter that reads; None: the base model.
        images: pages of the document as files or URLs, for a model that sees images.
        num_rivals: alternatives that are recorded for each token of the record.
        approved_from: the confidence from which on approved records say that values may pass unseen.
    """

    engine: Engine
    limits: Limits | None = DEFAULT_LIMITS
    max_tokens: int = DEFAULT_MAX_TOKENS
    ground: bool = False
    property_order: Literal["schema", "any"] = "schema"
    instructions: str = ""
    examples: tuple[Example, ...] = ()
    lora_request: LoRARequest | None = None
    images: tuple[bytes | str, ...] = ()
    num_rivals: int = 0
    approved_from: float | None = None

    async def stream(
        self, schema: Schema, text: str, *, source: str = "", cache_salt: str | None = None,
        room: int = MIN_OUTPUT_TOKENS,
    ) -> AsyncGenerator[PartialExtraction | ExtractionResult, None]:
        """Yield the record as it grows, then one ExtractionResult.

        Args:
            room: the tokens that have to be left for the record.

        Raises:
            TextTooLong: text and schema do not fit the model.
            GrammarError: the schema is malformed or cannot be enforced exactly.
            EngineError: the engine refused or lost the request.
        """
        read_checks(schema)  # validated before anything runs
        if self.images and self.ground:
            raise InvalidRequest(VERBATIM_IMAGES, "images")
        prompt_ids = await self.encode_prompt(schema, text)
        params = SamplingParams(max_tokens=self._fit(len(prompt_ids), room), temperature=0.0, logprobs=self.num_rivals)
        watch: LoopWatch | None = LoopWatch(schema, text, self.limits is not None)
        while watch is not None:
            loops, watch = watch, None
            steps = self._generate_bound(schema, text, prompt_ids, params, cache_salt, loops)
            # Leaving the block aborts a record that repeats itself; it is written again, shorter.
            async with aclosing(steps):
                async for plan, output in steps:
                    notes = (*plan.notes, *loops.notes)
                    watch = await loops.look(output.outputs[0].text, output.finished)
                    if watch is not None:
                        break
                    if not output.finished:
                        yield PartialExtraction(output.outputs[0].text, output)
        yield await asyncio.to_thread(self._conclude, schema, plan.bounds, text, source, output, notes)

    async def _generate_bound(
        self, schema: Schema, text: str, prompt_ids: list[int], params: SamplingParams,
        cache_salt: str | None, loops: LoopWatch,
    ) -> AsyncGenerator[tuple[_Plan, RequestOutput], None]:
        """Generate with added limits and the values of the text; without them where nothing satisfies them."""
        limits, with_lists = self.limits or (DEFAULT_LIMITS if loops.is_limited else None), True
        while True:
            # In a thread, because finding quotations in a text takes a while.
            plan = await asyncio.to_thread(self._make_plan, schema, text, limits, with_lists, loops)
            try:
                bound = replace(params, grammar=plan.grammar)
                asked = self.engine.generate(prompt_ids, bound, cache_salt=cache_salt, lora_request=self.lora_request)
                async with aclosing(asked) as outputs:
                    async for output in outputs:
                        yield plan, output
                return
            except GrammarError as error:
                # Errors come before the first token. The user's schema is the cause only if nothing was added to it.
                if plan.bounds.added:
                    limits = None
                elif plan.has_lists:
                    limits, with_lists = self.limits, False
                else:
                    raise _name_option(error) from error

    @property
    def sure_from(self) -> float | None:
        """Return the confidence from which on values may pass unseen; None if it was not measured for this model."""
        if self.approved_from is not None:
            return self.approved_from
        is_measured = self.lora_request is None and (Path(self.engine.config.model) / FILE_NAME).is_file()
        return LOW_CONFIDENCE if is_measured else None

    @property
    def model_name(self) -> str:
        """Return the name of the model or adapter that extracts."""
        return self.engine.model_name if self.lora_request is None else self.lora_request.lora_name

    async def extract(
        self, schema: Schema, text: str, *, source: str = "", cache_salt: str | None = None
    ) -> ExtractionResult:
        """Return the finished record."""
        result = await take_last(self.stream(schema, text, source=source, cache_salt=cache_salt))
        assert isinstance(result, ExtractionResult), "it comes last"
        return result

    def _make_plan(
        self, schema: Schema, text: str, limits: Limits | None, with_lists: bool, loops: LoopWatch
    ) -> _Plan:
        notes = (WITHOUT_LIMITS,) if limits is None and self.limits is not None else ()
        if self.ground and text.strip():
            grounded = mark_grounded(schema, text, with_lists)
            source = "\n".join([text, *list_spellings(text)])
        else:
            grounded, source = GroundedSchema(schema, False, ()), None
        # Listed values are limited by their lists.
        bounds = add_bounds(grounded.schema, limits, text)
        bounded = loops.shorten(bounds.schema)
        grammar = GrammarSpec.json_schema(bounded, "spaced", None, source, self.property_order)
        return _Plan(bounds, grammar, grounded.has_lists, notes + grounded.notes)

    async def encode_prompt(self, schema: Schema, text: str) -> list[int]:
        """Return the ids of the prompt for a text."""
        if self.engine.refusal:
            raise InvalidRequest(self.engine.refusal, "model")
        if self.images and not self.engine.sees_images:
            raise InvalidRequest(f"the model {self.model_name} does not see images: send text only", "images")
        messages = make_messages(schema, text, self.instructions, self.examples, self.images)
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("extraction needs a tokenizer; start the engine without skip_tokenizer_init")
        if tokenizer.has_chat_template:
            # A record needs no reasoning: the template's switch turns it off, the reasoning that it opens is closed,
            # or the final message is begun.
            try:
                prompt_ids, thinking = await prepare_prompt(self.engine, False, messages, enable_thinking=False)
            except PromptTooLong as error:  # the number of characters alone shows it
                raise TextTooLong(str(error).replace("messages has", "text and schema have"), "text") from error
            except InvalidRequest as error:
                raise InvalidRequest(str(error), "images" if self.images else error.param) from error
            if thinking is not None:
                end = FINAL if thinking.has_channels else f"\n{CLOSE}\n\n"
                # In place: a prompt with images is more than its ids.
                prompt_ids += tokenizer.encode(end, add_special_tokens=False)
            return prompt_ids
        if self.images:
            raise InvalidRequest("a model without a chat template has no place for images", "images")
        return await self.engine.encode(make_plain_prompt(messages))

    def _fit(self, num_prompt_tokens: int, needed: int = MIN_OUTPUT_TOKENS) -> int:
        limit = self.engine.resolved.max_model_len
        room = limit - num_prompt_tokens
        if room < needed:
            what, advice = "text and schema", "shorten the text by about"
            if self.images:
                what, advice = "text, images and schema", "send fewer images or less text, by about"
            raise TextTooLong(
                f"{what} are {num_prompt_tokens:,} tokens, but the model takes {limit:,} together with the "
                f"record, which needs at least {needed}: {advice} "
                f"{needed - room:,} tokens, or split it",
                "text",
            )
        return min(self.max_tokens, room)

    def _conclude(
        self, schema: Schema, bounds: BoundedSchema, text: str, source: str, output: RequestOutput,
        notes: tuple[str, ...],
    ) -> ExtractionResult:
        completion = output.outputs[0]
        reason = completion.finish_reason or "abort"
        record, errors = check_record(schema, completion, reason)
        seen = scan(completion.text)
        if not is_finite(seen.value):
            # JSON cannot represent it, so the record could be neither printed nor exported.
            seen, errors = Scan(), (f"{TOO_LARGE}: {completion.text}",)
        record = record if record is not None else seen.value
        confidence = self._confidence(completion, seen.leaves)
        evidence = find_evidence(seen.leaves, text)
        checks, sure_from = run_checks(schema, record, text), self.sure_from
        notes = (*notes, *list_cuts(schema, bounds, record, evidence, text))
        return ExtractionResult(
            source=source, record=record, raw=completion.text, valid=not errors, errors=errors,
            finish_reason=reason, confidence=confidence, evidence=evidence, leaves=tuple(seen.leaves),
            bounds=bounds, notes=notes, checks=checks,
            flags=find_flags(schema, seen.leaves, confidence, evidence, checks, sure_from, notes, text),
            sure_from=sure_from, output=output, usage=Usage.of(output),
        )

    def _confidence(self, completion: CompletionOutput, leaves: list[Leaf]) -> dict[str, float]:
        tokenizer = self.engine.tokenizer
        if not completion.logprobs or tokenizer is None:
            return {}
        feed_token = tokenizer.make_text().feed_token
        tokens = score_tokens(completion.text, completion.token_ids, completion.logprobs, feed_token)
        return field_confidence(leaves, tokens)


def _name_option(error: GrammarError) -> GrammarError:
    """Return the error in the user's terms if it concerns the keyword that verbatim texts add."""
    if not isinstance(error, UnsupportedGrammar) or GROUNDED not in str(error):
        return error
    keyword, reason = (words.replace(GROUNDED, VERBATIM) for words in (error.keyword, error.reason))
    return UnsupportedGrammar(error.pointer, keyword, f"{reason}; without verbatim texts it may be enforced")


def check_record(schema: Schema, completion: CompletionOutput, reason: str) -> tuple[Any, tuple[str, ...]]:
    """Return the record, and why it is not valid; a truncated record is never valid."""
    if reason == "length":
        is_loop = any(find_copies(str(leaf.value))[1] for leaf in scan(completion.text).leaves[-1:])
        why = f", {LOOPED}" if is_loop else ""
        return None, (f"cut off: the record reached the token limit before it was complete{why}",)
    if reason != "stop":
        return None, (completion.error or f"the request ended early ({reason})",)
    try:
        record = json.loads(completion.text)
    except ValueError as error:  # includes whole numbers with more digits than Python reads
        return None, (f"not JSON: {error}",)
    except RecursionError:
        return None, ("nested too deeply to be checked",)
    if not is_finite(record):
        return None, (TOO_LARGE,)
    return record, list_violations(schema, record)


def list_violations(schema: Schema, record: Any) -> tuple[str, ...]:
    """Return an independent validator's first violation of a record, or that it cannot validate it."""
    try:
        violation = SchemaValidator(schema).first_error(record)
    except GrammarError as error:
        return str(error),
    return () if violation is None else (f"{violation[0] or 'the record'}: {violation[1]}",)


def is_finite(value: Any) -> bool:
    """Return whether JSON can represent the value: 1e999 is read as infinite."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def make_again(schema: Schema, text: str, result: ExtractionResult, record: Any) -> ExtractionResult:
    """Return the result with another record, validated, with its evidence and its flags."""
    raw = json.dumps(record, indent=2, ensure_ascii=False)
    leaves = scan(raw + "\n").leaves
    errors, checks = list_violations(schema, record), run_checks(schema, record, text)
    evidence = find_evidence(leaves, text)
    return replace(
        result, record=record, raw=raw, valid=not errors, errors=errors, evidence=evidence,
        leaves=tuple(leaves), checks=checks,
        flags=find_flags(schema, leaves, result.confidence, evidence, checks, result.sure_from, result.notes, text),
    )
