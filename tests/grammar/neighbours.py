"""What hostile grammars do to the streams beside them: the time between tokens without and with them, in one run.

    python -m tests.grammar.neighbours [--rounds 3] [--seconds 10] [--model FOLDER]

Plain streams run all the time; quiet and hostile stretches take turns. In a hostile stretch two callers send one
hostile grammar after the other, each compiled or rejected, and generate a few tokens with the compiled ones.
Printed are the median and the 99th percentile of the time between two tokens of one stream, and their ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np

from engine import Engine, EngineConfig, EngineError, SamplingParams
from grammar import GrammarError, GrammarSpec

NUM_STREAMS = 8
NUM_CALLERS = 2
TOKENS_PER_STREAM = 400
PERCENTILES = (50, 99)


def nest(depth: int) -> dict[str, object]:
    """Return a schema of arrays in arrays."""
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def list_hostile(number: int) -> list[Callable[[], GrammarSpec]]:
    """Return what makes the grammars of one round; each differs from those of the last one."""
    return [
        lambda: GrammarSpec.json_schema(nest(10_000)),
        lambda: GrammarSpec.json_schema(
            {"properties": {f"a{number}": {"$ref": "#"}, "b": {"$ref": "#"}}, "required": ["b"]}
        ),
        lambda: GrammarSpec.json_schema({"enum": [f"value {i:06d} of {number}" for i in range(45_000)]}),
        lambda: GrammarSpec.json_schema({"enum": [f"value {i:06d} of {number}" for i in range(9_000)]}),
        lambda: GrammarSpec.regex(f"(.*a){{30}}{number}"),
        lambda: GrammarSpec.json_schema({"type": "string", "pattern": f"^(.*a){{30}}{number}$"}),
        lambda: GrammarSpec.json_schema({"type": "string", "minLength": 100_000 + number}),
        lambda: GrammarSpec.regex(f"(?:ab?){{100000}}{number}"),
        lambda: GrammarSpec.ebnf(f'root ::= "{number}" "a"{{100000}}'),
        lambda: GrammarSpec.json_schema({"minimum": "1", "title": str(number)}),
        lambda: GrammarSpec.json_schema({"type": "object", "title": str(number)}),
    ]


class Pace:
    """Collects the milliseconds between two tokens of one stream, apart for quiet and hostile stretches."""

    def __init__(self) -> None:
        self.is_hostile = False
        self.gaps: dict[bool, list[float]] = {False: [], True: []}
        self.answers: Counter[str] = Counter()
        self.over = asyncio.Event()

    async def stream(self, engine: Engine, number: int) -> None:
        """Read one plain stream after the other."""
        params = SamplingParams(max_tokens=TOKENS_PER_STREAM, ignore_eos=True, temperature=1.0, seed=number)
        while not self.over.is_set():
            last, num_last, was_hostile = None, 0, self.is_hostile
            async for output in engine.generate(f"Text {number}:", params):
                now, num_tokens = time.perf_counter(), len(output.outputs[0].token_ids)
                # A gap that a change of stretches falls into belongs to neither.
                if last is not None and num_tokens > num_last and was_hostile == self.is_hostile:
                    self.gaps[was_hostile].append(1e3 * (now - last) / (num_tokens - num_last))
                last, num_last, was_hostile = now, num_tokens, self.is_hostile
                if self.over.is_set():
                    break

    async def attack(self, engine: Engine, makers: Iterator[Callable[[], GrammarSpec]]) -> None:
        """Send one hostile grammar after the other until the stretch is over."""
        while self.is_hostile:
            make = next(makers)
            try:
                spec = await asyncio.to_thread(make)
                async for _ in engine.generate("Go on:", SamplingParams(max_tokens=4, grammar=spec)):
                    continue
            except (GrammarError, EngineError) as error:
                self.answers[type(error).__name__] += 1
            else:
                self.answers["generated"] += 1


def cycle_hostile() -> Iterator[Callable[[], GrammarSpec]]:
    """Yield makers of ever new hostile grammars."""
    for number in count(1):
        yield from list_hostile(number)


async def measure(model: str | None, rounds: int, seconds: float) -> Pace:
    """Run the stretches."""
    pace, makers = Pace(), cycle_hostile()
    async with Engine(EngineConfig(model=model) if model else EngineConfig()) as engine:
        streams = [asyncio.create_task(pace.stream(engine, number)) for number in range(NUM_STREAMS)]
        for _ in range(rounds):
            await asyncio.sleep(seconds)
            pace.is_hostile = True
            attacks = [asyncio.create_task(pace.attack(engine, makers)) for _ in range(NUM_CALLERS)]
            await asyncio.sleep(seconds)
            pace.is_hostile = False
            await asyncio.gather(*attacks)
        pace.over.set()
        await asyncio.gather(*streams)
    return pace


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="stretches of each kind (3)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long a stretch is (10)")
    parser.add_argument("--model", help="folder of the model (the embedded one)")
    options = parser.parse_args(arguments)
    pace = asyncio.run(measure(options.model, options.rounds, options.seconds))
    print(f"hostile grammars: {dict(pace.answers)}")
    for percent in PERCENTILES:
        quiet, hostile = (
            float(np.percentile(pace.gaps[flag] or [np.nan], percent)) for flag in (False, True)
        )
        print(
            f"between tokens, p{percent}: {quiet:.2f} ms quiet, {hostile:.2f} ms hostile, {hostile / quiet:.2f} times"
        )
    print(f"gaps: {len(pace.gaps[False])} quiet, {len(pace.gaps[True])} hostile")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
