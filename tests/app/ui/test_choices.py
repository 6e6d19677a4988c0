"""Choices accept values of an earlier process, also when Gradio has made them anew for a session."""

from pathlib import Path
from typing import Any

import pytest

from app.ui import choices
from app.ui.choices import OpenDropdown, OpenRadio


@pytest.mark.parametrize(("kind", "name"), [(OpenDropdown, "dropdown"), (OpenRadio, "radio")])
def test_a_choice_that_was_made_anew_accepts_a_value_that_is_not_among_its_options(kind: Any, name: str) -> None:
    made = kind(["a"], render=False)
    again = made.__class__(**made.constructor_args | {"choices": ["b"], "render": False})
    assert again.preprocess("c") == "c" and again.get_block_name() == name
    assert not Path(str(choices.__file__)).with_suffix(".pyi").exists(), "Gradio has written a stub"
