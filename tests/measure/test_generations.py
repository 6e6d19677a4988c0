"""Generations over schemas end valid or by their length, and each end is counted as what it is."""

from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.outputs import CompletionOutput
from grammar import GrammarSpec
from tests.app.api.harness import needs_model
from tests.measure.generations import SAMPLINGS, Counts, count_generations, read_specs

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "maskbench_dev.jsonl"
NUM_SCHEMAS = 6


@needs_model
@pytest.mark.skipif(
    not DATA.exists(), reason="the development part of MaskBench is not beside the repository"
)
def test_generations_over_schemas_end_valid_or_by_their_length() -> None:
    specs = read_specs(DATA)[:: 397 // NUM_SCHEMAS][:NUM_SCHEMAS]
    with LLM(num_blocks=300, num_threads=1) as llm:
        counts = count_generations(llm, specs, 2 * NUM_SCHEMAS, max_tokens=24)
    assert not counts.wrong
    assert [counts.ends[name].total() for name in SAMPLINGS] == [NUM_SCHEMAS, NUM_SCHEMAS]


@pytest.mark.parametrize(
    ("text", "reason", "error", "how"),
    [
        ("[1]", "stop", None, "valid"), ('["a"]', "stop", None, "invalid"), ("[", "length", None, "length"),
        ("[", "dead_end", "dead end: no way on", "dead_end"), ("[", "error", "out of memory", "error"),
    ],
)
def test_each_end_is_counted_as_what_it_is(text: str, reason: Any, error: str | None, how: str) -> None:
    counts, spec = Counts(), GrammarSpec.json_schema({"type": "array", "items": {"type": "integer"}})
    counts.add("greedy", "case", spec, CompletionOutput(0, text, [1], finish_reason=reason, error=error))
    assert counts.ends["greedy"] == {how: 1}
    assert bool(counts.wrong) == (how not in ("valid", "length"))
