"""The texts that the page and the READMEs offer come out right in every field."""

import json
from pathlib import Path

from app.extraction import extract
from app.extraction.scoring import score_record
from engine import LLM
from tests.app.api.harness import needs_model

ASSETS = Path(__file__).resolve().parents[3] / "assets"
RECORDS = json.loads(Path(__file__).with_name("sample_records.json").read_text(encoding="utf-8"))


@needs_model
def test_every_sample_comes_out_right() -> None:
    samples = sorted((ASSETS / "samples").glob("*.txt"))
    assert [path.stem for path in samples] == sorted(RECORDS)
    wrong = {}
    with LLM(num_threads=1, num_blocks=400) as llm:
        for path in samples:
            schema = json.loads((ASSETS / "schemas" / f"{path.stem.rsplit('_', 1)[0]}.json").read_text())
            (result,) = extract(llm, schema, [path.read_text(encoding="utf-8")])
            scores = score_record(result.record, RECORDS[path.stem])
            wrong |= {f"{path.stem}{pointer}": score for pointer, score in scores.items() if score < 1}
            wrong |= {f"{path.stem}: {check.message}": 0 for check in result.checks if not check.holds}
    assert wrong == {}
