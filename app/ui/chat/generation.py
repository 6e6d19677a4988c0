"""Asks the models of a chat: the prompt of a conversation, its parameters, and the outputs of all that answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from weakref import WeakKeyDictionary

from app.reasoning import Thinking, gate_grammar, prepare_prompt, write_output
from app.ui.chat.answers import WAITING, Answer, Outputs, Start, join_streams
from app.ui.chat.attachments import load_images
from app.ui.chat.conversation import History, to_model_messages
from app.ui.chat.settings import Settings, make_sampling_params
from app.ui.chat.thinking import ThinkingChoices, read_choices
from app.ui.model_choice import ModelChoice
from app.ui.pacing import pace
from engine import Engine, InvalidRequest, RequestOutput, SamplingParams

LONG_PROMPT = 256  # tokens, from which on it takes long enough to be named


class Generation:
    """The models that answer in a chat."""

    def __init__(self, models: ModelChoice, interval_s: float) -> None:
        self._models = models
        self._interval_s = interval_s
        self._choices: WeakKeyDictionary[Engine, ThinkingChoices] = WeakKeyDictionary()

    async def find_choices(self, engine: Engine) -> ThinkingChoices:
        """Return what the chat template lets a person choose about reasoning; nothing until it is loaded."""
        tokenizer = engine.tokenizer
        if tokenizer is None or not tokenizer.has_chat_template:
            return ThinkingChoices()
        if engine not in self._choices:
            self._choices[engine] = await asyncio.to_thread(read_choices, tokenizer.apply_chat_template)
        return self._choices[engine]

    async def generate(
        self, answer: Answer, history: History, settings: Settings, session: str
    ) -> AsyncGenerator[Outputs | None, None]:
        """Yield what the models have written so far, and None as a sign of life."""
        streams = {name: self._ask_model(name, answer, history, settings, session) for name in answer.names}
        async with aclosing(pace(join_streams(streams), self._interval_s)) as changes:
            async for outputs in changes:
                yield outputs

    async def _ask_model(
        self, name: str, answer: Answer, history: History, settings: Settings, session: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one model; their texts begin with the text that the answer goes on with."""
        if self._models.find(name) is None:
            answer.waits_for = f"Loading {name} …"
        async with self._models.hold(name) as (engine, lora_request):
            start, params = await self._prepare(engine, answer, name, history, settings)
            prompt_ids = [*start.prompt_ids, *start.token_ids]
            answer.waits_for = f"Reading {len(prompt_ids):,} tokens …" if len(prompt_ids) > LONG_PROMPT else WAITING
            # A separate cache salt, so that one visitor's prompts never show in another's cache timings.
            stream = engine.generate(
                start.prompt_ids, params, cache_salt=f"session-{session}", priority=int(settings.priority),
                generated_token_ids=[start.token_ids] if start.token_ids else (), lora_request=lora_request,
            )
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    written = output.outputs[0]
                    whole = replace(written, text=start.text + written.text)
                    yield replace(output, prompt_token_ids=prompt_ids, outputs=[whole])

    async def _prepare(
        self, engine: Engine, answer: Answer, name: str, history: History, settings: Settings
    ) -> tuple[Start, SamplingParams]:
        """Return what the model goes on with, and its parameters."""
        if name not in answer.starts:
            answer.starts[name] = await self._make_start(engine, answer, name, history, settings)
        start = answer.starts[name]
        num_before = len(start.prompt_ids) + len(start.token_ids)
        params = make_sampling_params(settings, num_before, engine.resolved.max_model_len)
        params = replace(params, max_tokens=(params.max_tokens or 0) + len(start.token_ids))
        if start.thinking is not None:
            # The end mark of reasoning may be a special token, and a grammar begins after it.
            params = replace(params, skip_special_tokens=False)
            if params.grammar is not None:
                params = replace(params, grammar=gate_grammar(params.grammar, start.thinking))
        return start, params

    async def _make_start(
        self, engine: Engine, answer: Answer, name: str, history: History, settings: Settings
    ) -> Start:
        tokenizer = engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("this engine runs without a tokenizer and has no chat")
        messages, thinking = to_model_messages(history, settings.system_prompt, name), None
        reasoning, content = answer.before.get(name, ("", ""))
        if tokenizer.has_chat_template:
            messages = await asyncio.to_thread(load_images, messages)
            choices = await self.find_choices(engine)
            thinks = settings.thinks or bool(reasoning)
            options = choices.make_options(thinks, settings.effort)
            prompt_ids, thinking = await prepare_prompt(engine, choices.knows, messages, **options)
            # Some models reason even when it is switched off.
            is_shown = thinks or not choices.has_switch
            split = thinking if is_shown else replace(thinking or Thinking(is_open=False), is_shown=False)
            answer.thinking[name] = split
        else:
            prompt_ids = await engine.encode("".join(f"{each['content']}\n\n" for each in messages))
        # Behind a new answer's prompt, because templates drop the reasoning of the last message, or trim it.
        text = write_output(reasoning, content, thinking)
        written = await engine.encode(text, add_special_tokens=False) if text else []
        return Start(prompt_ids, written, text, thinking)
