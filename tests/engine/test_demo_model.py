"""The embedded model: it loads in transformers too, gives the same greedy tokens, and does the demo's job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from engine import LLM, SamplingParams
from engine.config import DEMO_MODEL
from grammar import GrammarSpec, SchemaValidator

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = [
    [{"role": "user", "content": "Hello! Who are you?"}],
    [{"role": "user", "content": "What can you do?"}],
]

pytestmark = pytest.mark.skipif(
    not (Path(DEMO_MODEL) / "model.safetensors").exists(), reason="assets/demo_model has no weights"
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=300, num_threads=1) as llm:
        yield llm


def test_greedy_tokens_equal_those_of_transformers(llm: LLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    options = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    for output in llm.chat(MESSAGES, params, use_tqdm=False):
        ids = torch.tensor([output.prompt_token_ids])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        assert output.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "assets" / "schemas").glob("*.json")), ids=lambda path: path.stem
)
def test_every_example_schema_gets_a_valid_record(path: Path, llm: LLM) -> None:
    schema = json.loads(path.read_text(encoding="utf-8"))
    text = (ROOT / "assets" / "samples" / f"{path.stem}_1.txt").read_text(encoding="utf-8")
    prompt = f"Schema:\n{json.dumps(schema, separators=(',', ':'))}\n\nDocument:\n{text}"
    params = SamplingParams(max_tokens=600, temperature=0, grammar=GrammarSpec.json_schema(schema))
    completion = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)[0].outputs[0]
    if completion.finish_reason == "length":
        pytest.skip("the model did not come to an end; its text is not shown as valid either")
    assert SchemaValidator(schema).first_error(json.loads(completion.text)) is None
