"""The embedded model: it loads in transformers too, agrees on every token, and does the demo's job."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from engine.config_fields import DEMO_MODEL
from grammar import GrammarSpec, SchemaValidator

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = [[{"role": "user", "content": "Hello! Who are you?"}], [{"role": "user", "content": "What can you do?"}]]

pytestmark = pytest.mark.skipif(
    not (Path(DEMO_MODEL) / "model.safetensors").exists(), reason="assets/demo_model has no weights"
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=300, num_threads=1) as llm:
        yield llm


def test_every_greedy_token_is_the_best_one_for_transformers(llm: LLM) -> None:
    """Held step by step: where two tokens are as good as equal, either is right."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    for output in llm.chat(MESSAGES, SamplingParams(max_tokens=60, temperature=0), use_tqdm=False):
        chosen = torch.tensor(output.outputs[0].token_ids)
        ids = torch.tensor([*output.prompt_token_ids, *chosen.tolist()])
        with torch.inference_mode():
            logits = model(ids[None]).logits[0, len(output.prompt_token_ids) - 1 : -1]
        gap = logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]
        assert gap.max() < 1e-3


@pytest.mark.parametrize("path", sorted((ROOT / "assets" / "schemas").glob("*.json")), ids=lambda path: path.stem)
def test_every_example_schema_gets_a_valid_record(path: Path, llm: LLM) -> None:
    schema = json.loads(path.read_text(encoding="utf-8"))
    text = (ROOT / "assets" / "samples" / f"{path.stem}_1.txt").read_text(encoding="utf-8")
    prompt = f"Schema:\n{json.dumps(schema, separators=(',', ':'))}\n\nDocument:\n{text}"
    params = SamplingParams(max_tokens=600, temperature=0, grammar=GrammarSpec.json_schema(schema))
    completion = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)[0].outputs[0]
    if completion.finish_reason == "length":
        pytest.skip("the model did not come to an end; its text is not shown as valid either")
    assert SchemaValidator(schema).first_error(json.loads(completion.text)) is None
