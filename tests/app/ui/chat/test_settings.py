"""Settings become sampling parameters, or an error that names the setting."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.ui.chat.settings import (
    GRAMMAR_HINTS,
    Settings,
    build_model_choice,
    build_settings,
    make_grammar,
    make_sampling_params,
    pick_grammar,
    pick_preset,
    recommend_settings,
    restore_settings,
)
from engine import InvalidRequest
from grammar import GrammarError


def event(value: str) -> Any:
    return SimpleNamespace(value=value)


async def test_components_come_in_the_order_of_the_fields() -> None:
    with gr.Blocks():
        components = build_settings(Settings(), *build_model_choice(Settings(), has_choice=True)[:2])
    values = dataclasses.astuple(Settings())
    assert [component.value for component in components] == list(values)


def test_values_reach_the_sampler() -> None:
    settings = Settings(temperature=0, top_p=0.5, top_k=7.0, min_p=0.1, max_tokens=9.0, seed=" 42 ", stop="a\n\nb")
    params = make_sampling_params(settings, 10, 100)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, 7, 0.1)
    assert (params.max_tokens, params.seed, params.stop, params.grammar) == (9, 42, ("a", "b"), None)


def test_an_empty_seed_is_a_random_one() -> None:
    assert make_sampling_params(Settings(), 1, 100).seed is None


def test_the_output_is_cut_to_what_the_model_has_left() -> None:
    assert make_sampling_params(Settings(max_tokens=500), 90, 100).max_tokens == 10


def test_a_conversation_that_fills_the_model_is_refused_with_the_counts() -> None:
    with pytest.raises(InvalidRequest, match=r"has 3,000 tokens, and the model takes 2,048"):
        make_sampling_params(Settings(), 3000, 2048)


def test_a_seed_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_sampling_params(Settings(seed="lucky"), 1, 100)
    assert caught.value.param == "seed" and "lucky" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text", "spec"),
    [("JSON schema", "{}", "json_schema"), ("regex", "a+", "regex"), ("choice", "a\n\nb", "choice")],
)
def test_a_grammar_is_made_of_the_chosen_kind(kind: str, text: str, spec: str) -> None:
    grammar = make_grammar(kind, text)
    assert grammar is not None and grammar.kind == spec


def test_a_malformed_grammar_is_refused() -> None:
    with pytest.raises(GrammarError):
        make_grammar("JSON schema", "{")


def test_choosing_a_kind_shows_an_example_that_works() -> None:
    assert pick_grammar(event("none"))["visible"] is False
    for kind in ("JSON schema", "regex", "choice", "EBNF"):
        assert make_grammar(kind, pick_grammar(event(kind))["value"]) is not None
    assert "one or two sentences" in pick_preset(event("Short answers"))


def test_kept_settings_come_back_and_the_others_stay() -> None:
    """A person may have typed before they come."""
    kept: Any = {"system_prompt": "", "temperature": 1, "seed": 7, "with_tokens": 1, "grammar_kind": "regex"}
    names = [field.name for field in dataclasses.fields(Settings)]

    def restore(kept: Any) -> dict[str, Any]:
        values = zip(names, restore_settings(Settings(), kept), strict=True)
        return {name: value for name, value in values if value != gr.skip()}

    text = gr.update(visible=True, value="a+", label="Grammar: regex")
    assert restore(kept | {"grammar_text": "a+", "max_tokens": True, "other": 1}) == {
        "system_prompt": "", "temperature": 1, "grammar_kind": "regex", "grammar_text": text,
    }
    assert restore(kept)["grammar_text"]["value"] == GRAMMAR_HINTS["regex"]
    for broken in (None, [], {"grammar_kind": "rhyme", "temperature": None}):
        assert restore(broken) == {}


async def test_the_preset_on_the_page_is_the_one_of_the_default_prompt() -> None:
    for prompt, preset in ((Settings().system_prompt, "Helpful assistant"), ("", "None"), ("Be a cat.", None)):
        with gr.Blocks() as page:
            build_settings(Settings(system_prompt=prompt), gr.Dropdown(), gr.Checkbox())
        presets = [block for block in page.blocks.values() if getattr(block, "label", "") == "System prompt preset"]
        assert [block.value for block in presets] == [preset]


@pytest.mark.parametrize(
    ("found", "changes"),
    [
        ({}, {}),
        ({"top_k": 20}, {"temperature": 1.0, "top_p": 1.0, "top_k": 20}),
        (
            {"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.05, "max_tokens": 10**6},
            {"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.05, "max_tokens": 4096},
        ),
    ],
)
def test_the_page_begins_with_the_models_own_sampling(found: dict[str, Any], changes: dict[str, Any]) -> None:
    settings = recommend_settings(found)
    assert settings == dataclasses.replace(Settings(), **changes)
    params = make_sampling_params(settings, 1, 10**6)
    assert params.repetition_penalty == changes.get("repetition_penalty", 1.0)
