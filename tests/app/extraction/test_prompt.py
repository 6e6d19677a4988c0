"""The prompt is the one the demo model was trained on."""

import json

from app.extraction import make_messages
from app.extraction.prompt import SYSTEM_PROMPT, make_plain_prompt
from assets.demo_model.recipe.prompt import extraction_messages

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_the_recipe_and_the_app_build_the_same_messages() -> None:
    assert make_messages(SCHEMA, "Zürich, 5 °C") == extraction_messages(SCHEMA, "Zürich, 5 °C")


def test_bookkeeping_of_the_schema_file_is_left_out() -> None:
    content = make_messages({"$schema": "x", "$id": "y", **SCHEMA}, "text")[1]["content"]
    assert json.dumps(SCHEMA, separators=(",", ":")) in content
    assert "$schema" not in content and "$id" not in content


def test_a_model_without_template_gets_one_text() -> None:
    prompt = make_plain_prompt(make_messages(SCHEMA, "text"))
    assert prompt.startswith(SYSTEM_PROMPT) and prompt.endswith("JSON:\n")
