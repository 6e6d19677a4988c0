"""What the model weighed: values in full where they are known, and their beginning where they are not."""

import math
from types import SimpleNamespace
from typing import Any

from app.extraction.bounds import BoundedSchema
from app.extraction.choices import Choice, find_choices
from app.extraction.json_spans import scan
from engine import Logprob, TokenLogprobs


def make_position(*weighed: tuple[str, float]) -> TokenLogprobs:
    """A place of the output: the taken text first, each with its probability."""
    top = [Logprob(at, math.log(share), at + 1, text, math.log(share)) for at, (text, share) in enumerate(weighed)]
    return TokenLogprobs(top[0], top)


def test_alternatives_are_shown_in_full_where_schema_or_source_know_them() -> None:
    positions = [
        make_position(('{"currency": "', 0.999)), make_position(("US", 0.8), ("E", 0.1), ("C", 0.05)),
        make_position(("D", 0.99)), make_position(('", "total": ', 0.999)), make_position(("3", 0.9), ("1", 0.1)),
        make_position(("49", 0.99)), make_position(("}", 0.999)),
    ]
    text = "".join(each.token.decoded_token for each in positions)
    schema = {"properties": {"currency": {"enum": ["USD", "EUR", "CAD", "CHF"]}, "total": {"type": "number"}}}
    completion = SimpleNamespace(text=text, token_ids=[*range(len(positions))], logprobs=positions)
    made = SimpleNamespace(feed_token=str)
    engine: Any = SimpleNamespace(tokenizer=SimpleNamespace(make_text=lambda: made))
    result: Any = SimpleNamespace(
        output=SimpleNamespace(outputs=[completion]), leaves=scan(text + " ").leaves, bounds=BoundedSchema(schema)
    )
    found = find_choices(result, engine, "12 for 120 USD, Caen, the total being 349")
    assert found["/currency"] == Choice(("USD", 0.8), (("EUR", 0.1), ("Caen…", 0.05)), ())
    assert found["/total"] == Choice(("349", 0.9), (("1…", 0.1),), ())
