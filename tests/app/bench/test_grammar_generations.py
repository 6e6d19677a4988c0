"""Generations over the schemas of MaskBench: what the embedded model writes ends valid or by its length."""

from pathlib import Path

import pytest

from app.bench.grammar.generations import SAMPLINGS, Counts, count_generations, read_specs
from engine import LLM
from engine.config import DEMO_MODEL
from engine.outputs import CompletionOutput
from grammar import GrammarSpec

DATA = Path(__file__).parents[3].parent / "shared" / "data" / "maskbench_dev.jsonl"
NUM_SCHEMAS = 6


@pytest.mark.skipif(
    not DATA.exists(), reason="the development part of MaskBench is not beside the repository"
)
@pytest.mark.skipif(
    not (Path(DEMO_MODEL) / "model.safetensors").exists(), reason="assets/demo_model has no weights"
)
def test_generations_over_schemas_end_valid_or_by_their_length():
    specs = read_specs(DATA)[:: 397 // NUM_SCHEMAS][:NUM_SCHEMAS]
    with LLM(num_blocks=300, num_threads=1) as llm:
        counts = count_generations(llm, specs, 2 * NUM_SCHEMAS, max_tokens=24)
    assert not counts.wrong
    assert [counts.ends[name].total() for name in SAMPLINGS] == [NUM_SCHEMAS, NUM_SCHEMAS]


@pytest.mark.parametrize(
    ("completion", "how"),
    [
        (CompletionOutput(0, "[1]", [1], finish_reason="stop"), "valid"),
        (CompletionOutput(0, '["a"]', [1], finish_reason="stop"), "invalid"),
        (CompletionOutput(0, "[", [1], finish_reason="length"), "length"),
        (CompletionOutput(0, "[", [1], finish_reason="dead_end", error="dead end: no way on"), "dead_end"),
        (CompletionOutput(0, "[", [1], finish_reason="error", error="out of memory"), "error"),
    ],
)
def test_each_end_is_counted_as_what_it_is(completion, how):
    counts = Counts()
    counts.add(
        "greedy", "case", GrammarSpec.json_schema({"type": "array", "items": {"type": "integer"}}), completion
    )
    assert counts.ends["greedy"] == {how: 1}
    assert bool(counts.wrong) == (how not in ("valid", "length"))
