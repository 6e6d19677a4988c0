"""`bench gpu`: all GPU measurements and checks, in one run of ten minutes on a fresh machine.

    python -m app bench gpu --output-json gpu.json
    python -m app bench gpu --smoke        the same parts on a CPU, tiny; shows that they work, and no speed

Every part is a process of its own with its own time: one that fails, hangs or takes the device down with it is
recorded, and the next one goes on.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from app.bench.settings import describe_machine
from app.bench.workload import check_range
from app.config import UsageError

KERNELS, ENGINE = "kernels.triton.bench", "app.bench.gpu.parts"
ERROR_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Part:
    """One process.

    Attributes:
        budget_s: its share of the time; the sum is what a whole run takes at most.
    """

    name: str
    module: str
    budget_s: float
    is_extra: bool = False  # runs only on request


# In order of importance: limits of the machine, correctness, speed.
PARTS = (
    Part("ceilings", KERNELS, 20),
    Part("checks", KERNELS, 100),
    Part("syncs", ENGINE, 50),
    Part("table", KERNELS, 70),
    Part("nano-0.6b", ENGINE, 60),
    Part("nano-14b", ENGINE, 60),
    Part("single", ENGINE, 45),
    Part("switches", ENGINE, 50),
    Part("idle", ENGINE, 30),
    Part("structured", ENGINE, 50),
    Part("tune", KERNELS, 300, is_extra=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for the parts, the time and the output file."""
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--parts", default="", metavar="A,B", help=f"only these of: {names}")
    parser.add_argument("--budget-s", type=float, default=600.0, help="time of the whole run (600)")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes on the CPU: shows that the parts work"
    )
    parser.add_argument(
        "--output-json", type=Path, default=Path("gpu.json"), metavar="FILE", help="(gpu.json)"
    )


def run(arguments: argparse.Namespace, start: float) -> int:
    """Run the parts, write the figures, print the table; return 1 if a part failed.

    Raises:
        UsageError: an unknown part, a flag outside its range, or no GPU.
    """
    check_range(arguments, "budget_s", 1, 86400)
    if not arguments.smoke and not torch.cuda.is_available():
        raise UsageError(
            f"bench gpu needs a CUDA device, and torch {torch.__version__} sees none; "
            "--smoke tries the parts on the CPU"
        )
    parts = pick_parts(arguments.parts)
    results = run_parts(parts, arguments.budget_s, arguments.smoke)
    figures = {"machine": describe_machine(), "is_smoke": arguments.smoke, "parts": results}
    arguments.output_json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print("\n".join(report(figures)))
    return int(any(result["status"] != "ok" for result in results.values()))


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
    return [part for part in PARTS if part.name in wanted or not (wanted or part.is_extra)]


def run_parts(parts: Sequence[Part], budget_s: float, is_smoke: bool) -> dict[str, Any]:
    """Run the parts one after another until the time is up; the others are recorded as skipped."""
    deadline = time.monotonic() + budget_s
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="troupe-gpu-") as folder:
        for part in parts:
            left = deadline - time.monotonic()
            if left <= 0:
                results[part.name] = {
                    "status": "skipped",
                    "error": f"the {budget_s:g} s of the run were over",
                }
                continue
            limit = left if is_smoke else min(part.budget_s, left)
            results[part.name] = run_part(part, Path(folder) / f"{part.name}.json", limit, is_smoke)
    return results


def run_part(part: Part, target: Path, limit_s: float, is_smoke: bool) -> dict[str, Any]:
    """Run one process; return its figures, or why there are none."""
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


MAX_LINES = 40
Figures = dict[str, Any]
# part -> its line; the parts not named here are written below
LINES = {
    "ceilings": "copy {copy_bytes_per_s:.3g} B/s, read {read_bytes_per_s:.3g} B/s, "
    "products {gemm_flops_per_s:.3g} FLOP/s",
    "syncs": "{verdict}",
    "idle": "{verdict}",
    "nano-0.6b": "{tokens_per_s:.0f} tok/s, {share_of_measured_ceiling:.2f} of this device's {measured_ceiling:.0f}, "
    "{share_of_h200_ceiling:.2f} of an H200's {h200_ceiling:.0f}",
    "structured": "{structured_tokens_per_s:.0f} tok/s with a schema on every row, "
    "{structured_over_free:.2f} of free text",
}
LINES["nano-14b"] = LINES["nano-0.6b"]


def report(figures: Figures) -> list[str]:
    """Return the lines of the table; kernels that do not fit are replaced by a line with their number."""
    machine, parts = figures["machine"], figures["parts"]
    lines = [f"{machine['machine']}, torch {machine['torch']}, {machine['date']}"]
    if figures["is_smoke"]:
        lines.append("smoke run on a CPU: shows that the parts work; the figures below are not speeds")
    for name, result in parts.items():
        for number, line in enumerate(_describe(name, result)):
            lines.append(f"{'' if number else name:12}{line}")
    kernels = _list_kernels(parts.get("table", {}))
    room = MAX_LINES - len(lines)
    if len(kernels) > room:
        left_out = len(kernels) - max(0, room - 1)
        kernels = [*kernels[: max(0, room - 1)], f"  ... {left_out} more kernels in the JSON"]
    return (lines + kernels)[:MAX_LINES]


def _describe(name: str, result: Figures) -> list[str]:
    if result["status"] != "ok":
        last = (result.get("error") or "no message").splitlines()[-1]
        return [f"{result['status'].upper()}: {last[:100]}"]
    figures = result["figures"]
    match name:
        case "checks":
            wrong = figures["wrong"]
            right = f"{figures['num_checks'] - len(wrong)} of {figures['num_checks']} kernel checks right"
            return [right, f"WRONG: {', '.join(wrong)}"[:108]] if wrong else [right]
        case "single":
            return [f"{shape}: {ms:.2f} ms a token" for shape, ms in figures["ms_per_token"].items()]
        case "switches":
            rates = figures["tokens_per_s"]
            return [
                f"{each}: {rate:.0f} tok/s, {rate / rates['all on']:.2f} of all on"
                for each, rate in rates.items()
            ]
        case "tune":
            best = {kind: tried[0] for kind, tried in figures["tried"].items()}
            return [f"{kind}: {each['us']:.0f} us with {each['tile']}" for kind, each in best.items()]
        case _:
            return [LINES[name].format_map(figures)] if name in LINES else []


def _list_kernels(result: Figures) -> list[str]:
    if result.get("status") != "ok":
        return []
    lines = [f"{'kernel':44}{'us':>10}{'of copy':>9}{'of products':>13}"]
    for row in result["figures"]["kernels"]:
        share = f"{row['share_of_gemm']:.2f}" if row["share_of_gemm"] else ""
        lines.append(f"{row['name'][:43]:44}{row['us']:>10.1f}{row['share_of_copy']:>9.2f}{share:>13}")
    return lines
