"""All GPU measurements and checks, in one run of 20 minutes on a fresh machine.

    python -m tests.measure.gpu_day --output-json gpu.json
    python -m tests.measure.gpu_day --smoke        the same parts on a CPU, tiny; shows that they work, and no speed

Every part is a process of its own with its own time: one that fails, hangs or takes the device down with it is
recorded, and the next one goes on. The file is written after each part. A second start with the same file runs what has
not ended well yet.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from app.bench.settings import describe_machine
from app.bench.workload import add_number
from app.config import UsageError

KERNELS, ENGINE = "tests.measure.gpu_day.kernels", "tests.measure.gpu_day.parts"
ERROR_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Part:
    """One process.

    Attributes:
        budget_s: its share of the time; the sum limits the whole run.
    """

    name: str
    module: str
    budget_s: float


# In order of importance: limits of the machine, correctness, speed.
PARTS = (
    Part("ceilings", KERNELS, 20), Part("checks", KERNELS, 100), Part("tests", ENGINE, 400),
    Part("families", ENGINE, 120), Part("syncs", ENGINE, 50), Part("table", KERNELS, 70),
    Part("nano-0.6b", ENGINE, 60), Part("nano-14b", ENGINE, 60), Part("single", ENGINE, 45),
    Part("switches", ENGINE, 50), Part("idle", ENGINE, 30), Part("structured", ENGINE, 50),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for the parts, the time and the output file."""
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--parts", default="", metavar="A,B", help=f"only these of: {names}")
    add_number(parser, "--budget-s", 1200.0, 1, 86400, "time of the whole run")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU: shows that the parts work")
    parser.add_argument("--output-json", type=Path, default=Path("gpu.json"), metavar="FILE", help="(gpu.json)")


def run(arguments: argparse.Namespace) -> int:
    """Run the parts that the file has no figures of, write them, print the table; return 1 if a part failed.

    Raises:
        UsageError: a part is unknown, or there is no GPU.
    """
    if not arguments.smoke and not torch.cuda.is_available():
        raise UsageError(
            f"this needs a CUDA device, and torch {torch.__version__} sees none; "
            "--smoke tries the parts on the CPU"
        )
    parts = pick_parts(arguments.parts)
    figures = {"machine": describe_machine(), "is_smoke": arguments.smoke, "parts": {}}
    target: Path = arguments.output_json
    before = json.loads(target.read_text(encoding="utf-8")) if target.exists() else figures
    if before["is_smoke"] != arguments.smoke:
        raise UsageError(f"--output-json {target} has the figures of another kind of run; name another file")
    results = figures["parts"] = before["parts"]
    left = [part for part in parts if results.get(part.name, {}).get("status") != "ok"]
    for name, result in run_parts(left, arguments.budget_s, arguments.smoke):
        results[name] = result
        target.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print("\n".join(report(figures)))
    return int(any(results[part.name]["status"] != "ok" for part in parts))


def pick_parts(names: str) -> list[Part]:
    """Return the parts of a comma-separated list, in their fixed order; for an empty list all but the optional ones.

    Raises:
        UsageError: a name is not a part.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [part.name for part in PARTS]
    for name in wanted:
        if name not in known:
            raise UsageError(f"--parts {name!r} must be one of {', '.join(known)}")
    return [part for part in PARTS if part.name in wanted or not wanted]


def run_parts(parts: Sequence[Part], budget_s: float, is_smoke: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the parts one after another until the time is up; the others are recorded as skipped."""
    deadline = time.monotonic() + budget_s
    with tempfile.TemporaryDirectory(prefix="troupe-gpu-") as folder:
        for part in parts:
            left = deadline - time.monotonic()
            if left <= 0:
                yield part.name, {"status": "skipped", "error": f"the {budget_s:g} s of the run were over"}
                continue
            limit = left if is_smoke else min(part.budget_s, left)
            yield part.name, run_part(part, Path(folder) / f"{part.name}.json", limit, is_smoke)


def run_part(part: Part, target: Path, limit_s: float, is_smoke: bool) -> dict[str, Any]:
    """Run one process; return its figures, or the reason why it has none."""
    command = [sys.executable, "-m", part.module, part.name, "--json", str(target)]
    environment = dict(os.environ)
    if is_smoke:
        command.append("--smoke")
        environment["TRITON_INTERPRET"] = "1"
    start = time.monotonic()
    # In its own process group, so that processes started by a hung part are ended with it.
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=limit_s)
        status = "ok" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        status, errors = "timeout", f"stopped after {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    result: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - start, 1)}
    if status == "ok":
        return result | {"figures": json.loads(target.read_text(encoding="utf-8"))}
    return result | {"exit_code": process.returncode, "error": errors.strip()[-ERROR_CHARS:]}


def report(figures: dict[str, Any]) -> Iterator[str]:
    """Yield a line for the machine and each figure; tables, such as that of the kernels, are in the JSON only."""
    machine = figures["machine"]
    yield f"{machine['machine']}, torch {machine['torch']}, {machine['date']}"
    if figures["is_smoke"]:
        yield "smoke run on a CPU: shows that the parts work; the figures below are not speeds"
    for name, result in figures["parts"].items():
        if result["status"] != "ok":
            last = (result.get("error") or "no message").splitlines()[-1]
            yield f"{name:12}{result['status'].upper()}: {last[:100]}"
        else:
            yield from (f"{name:12}{line}" for line in list_figures(result["figures"]))


def list_figures(value: Any, name: str = "") -> Iterator[str]:
    """Yield the numbers and texts of a part's figures, each with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from list_figures(inner, f"{name} {key}".strip())
    elif isinstance(value, list):
        words = [each for each in value if isinstance(each, str)]
        yield f"{name}: {', '.join(words) or len(value)}"
    else:
        yield f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
