"""The generation settings of the chat: components on the page and their values as SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import gradio as gr

from app.ui.chat.thinking import EFFORTS, ThinkingChoices
from app.ui.scripts import read_script, write_kept
from engine import InvalidRequest, SamplingParams
from grammar import GrammarSpec

DEFAULT_SYSTEM_PROMPT = "You are a helpful assistant."
DEFAULT_MAX_TOKENS = 512
# Maximum of the slider; a request is also limited by the model.
MAX_TOKENS_LIMIT = 4096

# Alternatives recorded for every token of an answer.
NUM_RIVALS = 6

PRESETS = {
    "Helpful assistant": DEFAULT_SYSTEM_PROMPT,
    "Short answers": "You are a helpful assistant. Answer in one or two sentences.",
    "Step by step": "You are a careful assistant. Think step by step, then give the answer on a line of its own.",
    "Programmer": "You are an experienced programmer. Answer with code first, then explain it briefly.",
    "Editor": "You are an editor. Rewrite what you are given so that it is clear, correct and short.",
    "None": "",
}

GRAMMARS = ("none", "JSON schema", "regex", "choice", "EBNF")
GRAMMAR_HINTS = {
    "JSON schema": '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}',
    "regex": r"(yes|no), [a-z ]+\.",
    "choice": "positive\nneutral\nnegative",
    "EBNF": 'root ::= "Dear " [A-Z] [a-z]+ ","',
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of the settings components, in their order on the page."""

    system_prompt: str = DEFAULT_SYSTEM_PROMPT
    temperature: float = 0.7
    top_p: float = 0.95
    top_k: float = 0
    min_p: float = 0.0
    max_tokens: float = DEFAULT_MAX_TOKENS
    seed: str = ""
    stop: str = ""
    grammar_kind: str = "none"
    grammar_text: str = ""
    priority: float = 0
    with_tokens: bool = True
    models: list[str] = field(default_factory=list)  # model and adapters that answer; empty: the model
    repetition_penalty: float = 1.0
    thinks: bool = True
    effort: str = ""  # of the reasoning; empty: the model's own


def recommend_settings(recommended: Mapping[str, Any]) -> Settings:
    """Return the defaults with the sampling that a model recommends, if it recommends any."""
    if not recommended:
        return Settings()
    max_tokens = min(recommended.get("max_tokens", DEFAULT_MAX_TOKENS), MAX_TOKENS_LIMIT)
    return Settings(**{"temperature": 1.0, "top_p": 1.0, **recommended, "max_tokens": max_tokens})


def make_sampling_params(settings: Settings, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """Return sampling parameters; the output is limited to the model's remaining context.

    Raises:
        InvalidRequest: the prompt fills the model, or a value is out of range.
        GrammarError: the grammar is malformed.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise InvalidRequest(
            f"it has {num_prompt_tokens:,} tokens, and the model takes {max_model_len:,} together with the answer",
            "conversation",
        )
    return SamplingParams(
        max_tokens=min(int(settings.max_tokens), room), temperature=settings.temperature,
        top_p=settings.top_p, top_k=int(settings.top_k), min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty, seed=parse_seed(settings.seed),
        stop=tuple(line for line in settings.stop.split("\n") if line),
        grammar=make_grammar(settings.grammar_kind, settings.grammar_text),
        logprobs=NUM_RIVALS if settings.with_tokens else None,
    )


def parse_seed(text: str) -> int | None:
    """Return the typed seed; None for an empty field."""
    if not text.strip():
        return None
    try:
        return int(text)
    except ValueError as error:
        message = f"the seed {text.strip()!r} is not a whole number; leave it empty for a random one"
        raise InvalidRequest(message, "seed") from error


def make_grammar(kind: str, text: str) -> GrammarSpec | None:
    """Return the constraint chosen on the page; None without one."""
    match kind:
        case "JSON schema":
            return GrammarSpec.json_schema(text)
        case "regex":
            return GrammarSpec.regex(text)
        case "choice":
            return GrammarSpec.choice([line for line in text.split("\n") if line])
        case "EBNF":
            return GrammarSpec.ebnf(text)
        case _:
            return None


def build_model_choice(defaults: Settings, has_choice: bool) -> tuple[Any, Any, Any]:
    """Put the choice of the models that answer on the page, the switch of their reasoning, and the button to compare.

    The button's event `loaded` says that a model was loaded or ended.

    Args:
        has_choice: whether others than the first model may answer; the page gets their names when it opens.
    """
    answering = gr.Dropdown(
        [], value=defaults.models, multiselect=True, label="Answered by", container=False, visible=has_choice,
        elem_id="answering", allow_custom_value=True,  # Gradio would refuse names that came after the page was built
    )
    compare = gr.HTML(
        '<button type="button">+ Compare</button>', visible=has_choice, elem_id="compare", apply_default_css=False,
        js_on_load=read_script("answering"),
    )
    # Shown when the page knows that the model's chat template takes it, as the effort in the settings.
    thinks = gr.Checkbox(defaults.thinks, label="Think first", container=False, visible=False, elem_id="thinks")
    return answering, thinks, compare


def build_settings(
    defaults: Settings, answering: gr.Dropdown, thinks: gr.Checkbox
) -> list[gr.components.Component]:
    """Put the other settings on the page; returns all in the order of Settings' fields. The browser keeps changes."""
    quiet: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    chosen = next((name for name, prompt in PRESETS.items() if prompt == defaults.system_prompt), None)
    effort = gr.Radio(
        [("model's own", ""), *((each, each) for each in EFFORTS)], value=defaults.effort, label="Effort of thinking",
        visible=False,
    )
    preset = gr.Dropdown(list(PRESETS), value=chosen, label="System prompt preset", interactive=True)
    system = gr.Textbox(defaults.system_prompt, label="System prompt", lines=2, max_lines=8)
    # Not `input`, which also fires when the list is closed without a choice, and would replace typed text.
    preset.select(pick_preset, None, system, **quiet)
    temperature = gr.Slider(0, 2, defaults.temperature, step=0.05, label="Temperature")
    max_tokens = gr.Slider(1, MAX_TOKENS_LIMIT, defaults.max_tokens, step=1, label="Max tokens")
    kind = gr.Dropdown(list(GRAMMARS), value=defaults.grammar_kind, label="Grammar of the answer")
    text = gr.Textbox("", label="Grammar", lines=5, max_lines=16, visible=False, elem_classes="mono")
    kind.select(pick_grammar, None, text, **quiet)
    with gr.Accordion("Sampling", open=False):
        top_p = gr.Slider(0.01, 1, defaults.top_p, step=0.01, label="Top-p")
        top_k = gr.Slider(0, 200, defaults.top_k, step=1, label="Top-k (0 = off)")
        min_p = gr.Slider(0, 1, defaults.min_p, step=0.01, label="Min-p")
        penalty = gr.Slider(0.5, 2, defaults.repetition_penalty, step=0.01, label="Repetition penalty (1 = off)")
        # Not gr.Number, which shows an empty field as 0, a valid seed.
        seed = gr.Textbox("", label="Seed (same seed, same text)", placeholder="random", max_lines=1)
        stop = gr.Textbox("", label="Stop strings, one per line", lines=1, max_lines=4)
    with gr.Accordion("Engine", open=False):
        priority = gr.Slider(
            -10, 10, defaults.priority, step=1, label="Priority (lower runs first)",
            info="Has an effect only with --scheduling-policy priority.",
        )
        with_tokens = gr.Checkbox(
            defaults.with_tokens, label="Record token probabilities", info="Needed to look inside an answer."
        )
    by_name: dict[str, Any] = {
        "system_prompt": system, "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
        "max_tokens": max_tokens, "seed": seed, "stop": stop, "grammar_kind": kind, "grammar_text": text,
        "priority": priority, "with_tokens": with_tokens, "models": answering, "repetition_penalty": penalty,
        "thinks": thinks, "effort": effort,
    }
    components: list[gr.components.Component] = [by_name[each.name] for each in fields(Settings)]
    changes = [each.change for each in by_name.values()]
    keep = write_kept("writeSettings", asdict(defaults))
    # Wait for the previous change to be stored, so that the last one is not lost.
    gr.on(changes, None, components, None, js=keep, trigger_mode="always_last", **quiet)
    return components


def restore_settings(defaults: Settings, kept: Any, models: Sequence[tuple[str, str]] = ()) -> list[Any]:
    """Return the settings stored in the browser, in the order of the components; others stay unchanged.

    A value that is out of range is refused by name when it is used, as one that was typed.

    Args:
        models: labels and names of the models that can be chosen.
    """
    kept = kept if isinstance(kept, dict) else {}
    values = {
        name: kept[name] if _is_alike(kept.get(name), default) else gr.skip()
        for name, default in asdict(defaults).items()
    }
    chosen = values["models"] if isinstance(values["models"], list) else defaults.models
    names = [name for _, name in models]
    known = [name for name in chosen if name in names]
    values["models"] = gr.update(choices=list(models), value=known or names[:1]) if models else gr.skip()
    kind = values["grammar_kind"]
    if kind in GRAMMARS:
        shown = {} if isinstance(values["grammar_text"], dict) else {"value": values["grammar_text"]}
        values["grammar_text"] = gr.update(**show_grammar(kind) | shown)
    else:
        values["grammar_kind"] = gr.skip()
    return list(values.values())


def name_gone(kept: Any, models: Sequence[str]) -> str:
    """Return a note on the stored models that are not here any more; "" if none, or if there is no choice of models."""
    chosen = kept.get("models") if isinstance(kept, dict) else None
    if not models or not isinstance(chosen, list) or all(name in models for name in chosen):
        return ""
    gone, left = ([str(name) for name in chosen if (name in models) is is_here] for is_here in (False, True))
    return f"Not here any more: {', '.join(gone)}. Answering from now on: {', '.join(left) or models[0]}."


def show_thinking(choices: ThinkingChoices, thinks: bool) -> tuple[Any, Any]:
    """Show the switch of reasoning and, while it is on, the effort, if the chat template takes them."""
    efforts = [("model's own", ""), *((each, each) for each in choices.efforts)]
    has_effort = bool(choices.efforts) and (thinks or not choices.has_switch)
    return gr.update(visible=choices.has_switch), gr.update(visible=has_effort, choices=efforts)


def _is_alike(value: Any, default: Any) -> bool:
    """Return whether it is a text, a switch or a number, like the default."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number if type(default) in (int, float) else type(value) is type(default)


def pick_preset(data: gr.SelectData) -> str:
    """Return the system prompt of the chosen preset."""
    return PRESETS[data.value]


def pick_grammar(data: gr.SelectData) -> dict[str, Any]:
    """Fill the grammar's text box with an example of the chosen kind."""
    return gr.update(**show_grammar(data.value))


def show_grammar(kind: str) -> dict[str, Any]:
    """Return the appearance of the grammar's text box for a kind."""
    return {"visible": kind in GRAMMAR_HINTS, "value": GRAMMAR_HINTS.get(kind, ""), "label": f"Grammar: {kind}"}
