"""The empty chat: what it says of the models that answer, its example questions, and the settings that fit a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from app.ui.chat.settings import Settings, recommend_settings
from app.ui.examples import is_demo_model
from app.ui.model_choice import ModelChoice
from engine import ConfigError, Engine, read_sampling_defaults

WELCOME = "## Chat with {names}\n{about}Answers are written on this machine; nothing leaves it."
ABOUT_DEMO = (
    "The embedded demo model has a few million parameters and was trained to extract data from short texts. "
    "In the chat it knows little beyond this app. For a real model load one under [Engine](#engine), or start with "
    "`--model Qwen/Qwen3-0.6B`.\n\n"
)
ABOUT_DUMMY = "**Random weights** (`--load-format dummy`): this shows the engine, the text means nothing.\n\n"
DEMO_EXAMPLES = ["Hello! Who are you?", "What can you do?", "How do I extract data from a text?"]
EXAMPLES = [
    "Explain paged attention to a new colleague.",
    "Write a haiku about a cache that is never cold.",
    "What is the difference between a process and a thread?",
]


def welcome(models: ModelChoice, names: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return what the empty chat says of the models that answer, and its example questions."""
    engines = [models.find(name) for name in names or [models.engine.model_name]]
    if len(engines) == 1 and engines[0] is not None and (not names or engines[0].model_name == names[0]):
        return describe_model(engines[0]), DEMO_EXAMPLES if is_demo_model(engines[0]) else EXAMPLES
    about = "What is not loaded yet is loaded when you ask. " if None in engines else ""
    return WELCOME.format(names=" and ".join(f"**{name}**" for name in names), about=about), EXAMPLES


def describe_model(engine: Engine) -> str:
    """Describe one model."""
    if engine.config.load_format == "dummy":
        return WELCOME.format(names=engine.model_name, about=ABOUT_DUMMY)
    if is_demo_model(engine):
        return WELCOME.format(names="the demo model", about=ABOUT_DEMO)
    if engine.refusal:
        return f"{engine.model_name}: {engine.refusal}."
    return WELCOME.format(names=f"**{engine.model_name}**", about="")


def choose_settings(engine: Engine) -> Settings:
    """Choose settings that fit the model. The demo model was mostly trained without a system prompt."""
    if is_demo_model(engine):
        return Settings(system_prompt="", temperature=0.0)
    return recommend_settings(read_defaults(engine))


def read_defaults(engine: Engine) -> dict[str, Any]:
    """Return the sampling that the model recommends; nothing if its files cannot be read, which the start reports."""
    with suppress(ConfigError):
        return read_sampling_defaults(engine.config.model, engine.config.generation_config)
    return {}
