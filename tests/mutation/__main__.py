"""Mutation testing: `python -m tests.mutation map`, then `python -m tests.mutation run --sample 300`.

    map    run the suite once and record which test executes which line of the files in TARGETS
    run    change one place at a time, run the tests that execute its line, and print the share that failed

A mutant is killed when a test fails, or takes far longer than it did. Each mutant runs in a child forked from a
process that has imported the libraries but none of our packages, so it costs seconds. Survivors are printed as diffs.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import coverage
import pytest

from tests.mutation.edits import find_edits

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(tempfile.gettempdir()) / "troupe-mutation"
TARGETS = {
    "scheduler": [
        f"engine/core/{name}.py" for name in ("scheduler", "scheduler_state", "answer_reader", "step")
    ],
    "KV cache": [f"engine/core/{name}.py" for name in ("kv_cache_manager", "block_pool", "block_hash")],
    "grammar rules": ["grammar/schema/*.py"],
    "sampler": ["engine/worker/sampling/*.py", "engine/sampling_params.py", "kernels/sampling.py"],
    "API validation": [f"app/api/{name}.py" for name in ("fields", "sampling", "constraint", "json_body")],
}
TEST_FOLDERS = ("tests/engine", "tests/grammar", "tests/kernels", "tests/app")
LIBRARIES = ("torch", "transformers", "hypothesis", "gradio", "fastapi", "aiohttp", "xgrammar")
MAX_TESTS = 120
NUM_CONTROLS = 10
CONTROL = -1  # the number of a mutant without a change
MAX_TESTS_S = 30.0


@dataclass(frozen=True)
class Mutant:
    """One change: the area and the file, the line, and its number among the changes of the file."""

    area: str
    path: str
    line: int
    number: int


def list_files() -> dict[str, str]:
    """Return path -> area of every file that is mutated."""
    return {
        str(path.relative_to(ROOT)): area
        for area, patterns in TARGETS.items()
        for pattern in patterns
        for path in sorted(ROOT.glob(pattern))
        if path.name != "__init__.py"
    }


def record(workers: int) -> None:
    """Run the suite under coverage and write the tests of every line to FOLDER."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    files = [str(ROOT / path) for path in list_files()]
    environment = os.environ | {"MUTATION_FOLDER": str(FOLDER), "MUTATION_FILES": json.dumps(files)}
    options = ["-p", "tests.mutation.recorder", "-n", str(workers)]
    command = [sys.executable, "-m", "pytest", *options, *TEST_FOLDERS]
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    data = coverage.CoverageData(str(FOLDER / "combined"))
    for part in FOLDER.glob("coverage.*"):
        other = coverage.CoverageData(str(part))
        other.read()
        data.update(other)
    outcomes = [json.loads(part.read_text(encoding="utf-8")) for part in FOLDER.glob("tests-*.json")]
    durations = {name: seconds for outcome in outcomes for name, seconds in outcome["durations"].items()}
    failed = {name for outcome in outcomes for name in outcome["failed"]}
    lines = {
        path: {
            line: [name for name in names if name in durations and name not in failed]
            for line, names in data.contexts_by_lineno(str(ROOT / path)).items()
        }
        for path in list_files()
    }
    (FOLDER / "map.json").write_text(json.dumps({"durations": durations, "lines": lines}), encoding="utf-8")


def parse(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def make_mutants() -> list[Mutant]:
    return [
        Mutant(area, path, edit.line, number)
        for path, area in list_files().items()
        for number, edit in enumerate(find_edits(parse(path)))
    ]


def mutate(mutant: Mutant) -> ast.Module:
    """Return the syntax tree of the mutant's file with its change made."""
    tree = parse(mutant.path)
    if mutant.number != CONTROL:
        find_edits(tree)[mutant.number].apply()
    return ast.fix_missing_locations(tree)


def make_diff(mutant: Mutant) -> str:
    before, after = (ast.unparse(tree).splitlines() for tree in (parse(mutant.path), mutate(mutant)))
    _, _, *changes = difflib.unified_diff(before, after, n=1, lineterm="")  # behind the names of the files
    return "\n    ".join(changes)


class MutantLoader(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module from a changed syntax tree, and leaves all others alone."""

    def __init__(self, mutant: Mutant) -> None:
        name = mutant.path.removesuffix(".py").replace("/", ".")
        super().__init__(name, str(ROOT / mutant.path))
        self.tree = mutate(mutant)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_ours = fullname == self.name
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self) if is_ours else None

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        return compile(copy.deepcopy(self.tree), self.path, "exec")


class LineTests:
    """The tests of every line and how long each takes, as `map` recorded them."""

    def __init__(self) -> None:
        found = json.loads((FOLDER / "map.json").read_text(encoding="utf-8"))
        self.durations: dict[str, float] = found["durations"]
        self.lines: dict[str, dict[str, list[str]]] = found["lines"]

    def choose_tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that execute the mutant's line: those of its own folder first, the quick ones first."""
        folder = "tests/" + os.path.dirname(mutant.path)
        names = self.lines[mutant.path].get(str(mutant.line), [])
        names.sort(key=lambda name: (not name.startswith(folder), self.durations[name]))
        chosen, seconds = [], 0.0
        for name in names[:MAX_TESTS]:
            seconds += self.durations[name]
            if chosen and seconds > MAX_TESTS_S:
                break
            chosen.append(name)
        return chosen

    def deadline_s(self, tests: list[str]) -> float:
        """Return how long the tests may take before their mutant counts as killed."""
        return 60 + 5 * sum(self.durations[name] for name in tests)


def start_child(mutant: Mutant, tests: list[str]) -> int:
    """Fork a process that runs the tests with the mutant's change and exits with pytest's code; return its id."""
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = 1
    try:
        sys.meta_path.insert(0, MutantLoader(mutant))
        code = int(pytest.main([*options, *tests]))
    finally:
        os._exit(code)


def run_all(mutants: list[Mutant], line_tests: LineTests, workers: int) -> Iterator[tuple[Mutant, bool]]:
    """Run every mutant in a child, `workers` at a time; yield whether it was killed."""
    waiting = list(mutants)
    running: dict[int, tuple[Mutant, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.pop()
            if tests := line_tests.choose_tests(mutant):
                deadline = time.monotonic() + line_tests.deadline_s(tests)
                running[start_child(mutant, tests)] = mutant, deadline
            else:
                yield mutant, False
        time.sleep(0.05)
        for child, (mutant, deadline) in list(running.items()):
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                del running[child]
                yield mutant, status != 0


def run(sample: int, seed: int, workers: int) -> None:
    """Try an equal share of the sample in each area and print the survivors and the share killed."""
    for name in LIBRARIES:
        importlib.import_module(name)
    line_tests = LineTests()
    possible = make_mutants()
    chosen: list[Mutant] = []
    for area in TARGETS:
        of_area = [each for each in possible if each.area == area]
        chosen += random.Random(seed).sample(of_area, min(sample // len(TARGETS), len(of_area)))
    controls = [replace(each, number=CONTROL) for each in chosen[:: max(1, len(chosen) // NUM_CONTROLS)]]
    if any(is_killed for _, is_killed in run_all(controls, line_tests, workers)):
        sys.exit("the tests fail without any change; run `map` again")
    killed: Counter[str] = Counter()
    for mutant, is_killed in run_all(chosen, line_tests, workers):
        killed[mutant.area] += is_killed
        if not is_killed:
            count = len(line_tests.choose_tests(mutant))
            print(f"survived {count} tests: {mutant.path}:{mutant.line}\n    {make_diff(mutant)}", flush=True)
    for area in TARGETS:
        print(f"{area}: {killed[area]} of {sum(each.area == area for each in chosen)} killed")
    total, share = killed.total(), killed.total() / len(chosen)
    print(f"all: {total} of {len(chosen)} killed ({share:.1%}); {len(possible)} mutants are possible")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.split("\n")[0])
    parser.add_argument("verb", choices=("map", "run"))
    parser.add_argument("--sample", type=int, default=300, help="mutants to try")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    arguments = parser.parse_args()
    if arguments.verb == "map":
        record(arguments.workers)
    else:
        run(arguments.sample, arguments.seed, arguments.workers)


if __name__ == "__main__":
    main()
