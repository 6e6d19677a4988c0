"""Grammars over the development part of MaskBench, beside raw llguidance and raw xgrammar in the same run.

    python -m tests.measure.maskbench.run --schemas maskbench.jsonl --ranks cl100k_base.tiktoken [--num 100]

Each engine is a process of its own; the schemas go round, one engine after the other. `compile` is from the schema
to the first mask, `mask` one fill, `step` a fill and the token taken after it, `rows` the best of several fills of
a batch that is inside strings. A schema is right when every valid instance is taken whole and every invalid one
is not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ENGINES = ("troupe", "llguidance", "xgrammar")
NUM_ROWS = 64


@dataclass(slots=True)
class Tally:
    """Counts and times of one engine. A refusal or a timeout is not right, but not an invalid instance accepted."""

    compile_ms: list[float] = field(default_factory=list)
    fill_us: list[float] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)
    num_right: int = 0
    num_invalid_accepted: int = 0
    num_valid_refused: int = 0
    num_refused: int = 0
    num_timeouts: int = 0
    not_right: dict[str, str] = field(default_factory=dict)

    def add(self, case: dict[str, Any], answer: dict[str, Any] | None, limit_s: float) -> None:
        """Count one schema; no answer means that it took too long."""
        if answer is None:
            self.num_timeouts += 1
            self.compile_ms.append(1e3 * limit_s)
            self.not_right[case["name"]] = "timeout"
            return
        self.compile_ms.append(answer["compile_ms"])
        if "refused" in answer:
            self.num_refused += 1
            self.not_right[case["name"]] = f"refused: {answer['refused']}"
            return
        self.fill_us += answer["fill_us"]
        self.step_us += answer["step_us"]
        pairs = list(zip(answer["verdicts"], (test["valid"] for test in case["tests"]), strict=True))
        is_loose = (True, False) in pairs
        is_tight = (False, True) in pairs
        self.num_invalid_accepted += is_loose
        self.num_valid_refused += is_tight
        self.num_right += not (is_loose or is_tight)
        if is_loose or is_tight:
            self.not_right[case["name"]] = "invalid accepted" if is_loose else "valid refused"

    def summarise(self) -> dict[str, float]:
        """Return the figures of the table."""
        return {
            **{f"compile p{p:g} ms": percentile(self.compile_ms, p) for p in (50, 75, 99, 100)},
            **{f"mask p{p:g} us": percentile(self.fill_us, p) for p in (50, 99, 99.9)},
            **{f"step p{p:g} us": percentile(self.step_us, p) for p in (50, 99)}, "right": self.num_right,
            "invalid accepted": self.num_invalid_accepted, "valid refused": self.num_valid_refused,
            "schemas refused": self.num_refused, "timeouts": self.num_timeouts,
        }


class Worker:
    """An engine's process; one that ended itself is started again."""

    def __init__(self, engine: str, ranks: Path, limit_s: float, clock: str) -> None:
        script = [sys.executable, "-m", "tests.measure.maskbench.worker"]
        self._command = [*script, engine, str(ranks), str(limit_s), clock]
        self._process: subprocess.Popen[str] | None = None

    def ask(self, order: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer, None when it took too long."""
        process = self._start()
        assert process.stdin is not None and process.stdout is not None, "it was started with pipes"
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            self.close()
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
            )
        return self._process


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, 0 without values."""
    return float(np.percentile(values, percent)) if values else 0.0


def run_bench(
    cases: Sequence[dict[str, Any]], engines: Sequence[str], ranks: Path, limit_s: float, clock: str
) -> dict[str, dict[str, Any]]:
    """Return engine -> its figures."""
    workers = {engine: Worker(engine, ranks, limit_s, clock) for engine in engines}
    tallies = {engine: Tally() for engine in engines}
    try:
        for case in cases:
            texts = [json.dumps(test["data"], ensure_ascii=False) for test in case["tests"]]
            order = {"schema": case["schema"], "texts": texts}
            for engine, worker in workers.items():
                tallies[engine].add(case, worker.ask(order), limit_s)
        rows = {engine: worker.ask({"rows": NUM_ROWS}) or {} for engine, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    return {
        engine: {
            **tally.summarise(), **{f"{NUM_ROWS} rows, {name}, us": value for name, value in rows[engine].items()},
            "not right": tally.not_right,
        }
        for engine, tally in tallies.items()
    }


def make_table(figures: dict[str, dict[str, Any]], num_cases: int) -> str:
    """Return the figures, one line each, one column an engine."""
    names = dict.fromkeys(name for each in figures.values() for name in each if name != "not right")
    lines = [f"{f'{num_cases} schemas':<28}" + "".join(f"{engine:>12}" for engine in figures)]
    for name in names:
        lines.append(f"{name:<28}" + "".join(f"{make_cell(each.get(name)):>12}" for each in figures.values()))
    return "\n".join(lines)


def make_cell(value: float | None) -> str:
    """Return a count whole, a time with two places, and - for what an engine refused."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The schemas, the vocabulary, the engines."""
    parser.add_argument(
        "--schemas", type=Path, required=True, metavar="FILE", help="cases of MaskBench, one per line"
    )
    parser.add_argument(
        "--ranks", type=Path, required=True, metavar="FILE", help="vocabulary, as a tiktoken rank file"
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="engines to measure (all)")
    parser.add_argument("--num", type=int, help="number of schemas, spread evenly over the file")
    parser.add_argument("--limit-s", type=float, default=10.0, help="seconds one schema may take an engine (10)")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time, for a busy machine"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arguments = parser.parse_args()
    cases = [json.loads(line) for line in arguments.schemas.read_text(encoding="utf-8").splitlines()]
    if arguments.num is not None:
        cases = cases[:: max(len(cases) // max(arguments.num, 1), 1)]
    figures = run_bench(cases, arguments.engines, arguments.ranks, arguments.limit_s, arguments.clock)
    print(make_table(figures, len(cases)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
