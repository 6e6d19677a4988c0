"""Constraints behind thoughts on the real engine: the embedded model, led into thoughts it never learnt."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from app.config import AppConfig
from engine import Engine, EngineConfig
from grammar import SchemaValidator
from tests.app.api.harness import CHAT, Server, needs_model, run_server
from tests.app.api.test_thinking import FORMAT, SCHEMA, TOOL, message_of

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% elif opens %}<think>
{% endif %}{% endif %}"""


def name_marks(path: Path, is_special: bool) -> None:
    """Give a tokenizer's last words over to the marks of a thought, as tokens of their own."""
    read = json.loads(path.read_text())
    ids = read["model"]["vocab"]
    last = sorted(ids, key=ids.__getitem__)[-2:]
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in read["model"]["merges"]]
    read["model"]["merges"] = [pair for pair in merges if not {*pair, "".join(pair)} & {*last}]
    for word, mark in zip(last, ("<think>", "</think>"), strict=True):
        ids[mark] = ids.pop(word)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        read["added_tokens"].append({"id": ids[mark], "content": mark, "special": is_special, **flags})
    path.write_text(json.dumps(read))


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[False, True], ids=["plain marks", "special marks"]
)
async def real(tmp_path_factory: pytest.TempPathFactory, request: Any) -> AsyncIterator[Server]:
    folder = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(EngineConfig().model, folder, ignore=shutil.ignore_patterns("recipe"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    name_marks(folder / "tokenizer.json", request.param)
    config = EngineConfig(model=str(folder), num_blocks=512)
    async with Engine(config) as engine, run_server(engine, AppConfig()) as running:
        yield running


FIELDS: list[dict[str, Any]] = [
    {"response_format": FORMAT}, {"structured_outputs": {"regex": "[ab]{2}"}},
    {"structured_outputs": {"choice": ["yes", "no"]}}, {"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}},
    {"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}},
    {"structured_outputs": {"csv": {"columns": {"n": ["a", "b"]}, "has_header": False}}},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
]


@pytest.mark.asyncio(loop_scope="module")
@needs_model
@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("number", range(len(FIELDS)))
async def test_a_real_engine_holds_the_constraint_behind_the_thought(real: Server, number: int, opens: bool) -> None:
    # this model never learnt to think: a bias makes it begin, and end after a few words
    marks = {mark: real.engine.tokenizer.encode(mark, False)[0] for mark in ("<think>", "</think>")}
    strengths = {"</think>": 14} if opens else {"<think>": 60, "</think>": 75}
    bias = {str(marks[mark]): strength for mark, strength in strengths.items()}
    body = {"messages": CHAT["messages"], "chat_template_kwargs": {"opens": opens}, "logit_bias": bias}
    sent = body | {"seed": 0, "max_tokens": 300} | FIELDS[number]
    status, reply = await real.post("/v1/chat/completions", sent)
    assert status == 200, reply
    message = message_of(reply)
    assert reply["choices"][0]["finish_reason"] != "length", message
    assert reply["structured"]["valid"] is (None if number in (3, 4) else True)
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert "think>" not in json.dumps(message["content"])
    if number == 0:
        assert SchemaValidator(SCHEMA).is_valid(json.loads(message["content"]))
    if number == 6:
        assert json.loads(message["tool_calls"][0]["function"]["arguments"])["a"] in (1, 2)
