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


def test_images_stand_before_the_text_of_a_document() -> None:
    (_, asked) = make_messages({"type": "object"}, "page 1", images=[b"png"])
    assert [part["type"] for part in asked["content"]] == ["text", "image", "text"]
    assert asked["content"][0]["text"].endswith("Document:\n") and asked["content"][2]["text"] == "page 1"
