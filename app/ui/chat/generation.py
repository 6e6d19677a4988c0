"""Asks the models of a chat: the prompt of a conversation, its parameters, and the outputs of all that answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from app.reasoning import OPEN, Thinking, gate_grammar, prepare_prompt
from app.ui.chat.answers import Answer, Outputs, join_streams
from app.ui.chat.attachments import load_images
from app.ui.chat.conversation import History, to_model_messages
from app.ui.chat.settings import Settings, make_sampling_params
from app.ui.chat.thinking import ThinkingChoices, read_choices
from app.ui.model_choice import ModelChoice
from app.ui.pacing import pace
from engine import Engine, InvalidRequest, RequestOutput, SamplingParams


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
        async with self._models.hold(name) as (engine, lora_request):
            prompt_ids, params = await self._prepare(engine, answer, name, history, settings)
            before = answer.write_before(name)
            # A separate cache salt, so that one visitor's prompts never show in another's cache timings.
            stream = engine.generate(
                prompt_ids, params, cache_salt=f"session-{session}", priority=int(settings.priority),
                lora_request=lora_request,
            )
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    written = output.outputs[0]
                    yield replace(output, outputs=[replace(written, text=before + written.text)]) if before else output

    async def _prepare(
        self, engine: Engine, answer: Answer, name: str, history: History, settings: Settings
    ) -> tuple[list[int], SamplingParams]:
        tokenizer = engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("this engine runs without a tokenizer and has no chat")
        messages, thinking = to_model_messages(history, settings.system_prompt, name), None
        reasoning, content = answer.before[name]
        options: dict[str, Any] = {}
        if content and not reasoning:
            messages.append({"role": "assistant", "content": content})
            options = {"add_generation_prompt": False, "continue_final_message": True}
        if tokenizer.has_chat_template:
            messages = await asyncio.to_thread(load_images, messages)
            choices = await self.find_choices(engine)
            options |= choices.make_options(settings.thinks or bool(reasoning), settings.effort)
            prompt_ids, thinking = await prepare_prompt(engine, choices.knows, messages, **options)
            # Some models reason even when it is switched off.
            is_shown = settings.thinks or bool(reasoning) or not choices.has_switch
            split = thinking if is_shown else replace(thinking or Thinking(is_open=False), is_shown=False)
            answer.thinking[name] = split
            if reasoning:
                # Templates drop or close the reasoning of a message; behind a new answer's prompt it goes on as it was.
                written = answer.write_before(name)
                opened = f"{OPEN}\n" if split is not None and split.is_open else ""
                more = await engine.encode(written.removeprefix(opened), add_special_tokens=False)
                prompt_ids = [*prompt_ids, *more]
        else:
            text = "\n\n".join(m["content"] for m in messages)
            prompt_ids = await engine.encode(text if content else f"{text}\n\n")
        params = make_sampling_params(settings, len(prompt_ids), engine.resolved.max_model_len)
        if thinking is not None:
            # The end mark of reasoning may be a special token, and a grammar begins after it.
            params = replace(params, skip_special_tokens=False)
            if params.grammar is not None:
                params = replace(params, grammar=gate_grammar(params.grammar, thinking))
        return prompt_ids, params
