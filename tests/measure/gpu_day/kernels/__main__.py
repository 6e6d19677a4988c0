"""One part of the kernel benchmarks, run by itself: `python -m tests.measure.gpu_day.kernels table --json FILE`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.measure.gpu_day.kernels.ceilings import measure_ceilings
from tests.measure.gpu_day.kernels.checks import check_kernels
from tests.measure.gpu_day.kernels.table import measure_table
from tests.measure.gpu_day.kernels.timing import Bench


def run_part(part: str, bench: Bench) -> dict[str, Any]:
    """Measure one part."""
    if part == "ceilings":
        return measure_ceilings(bench)
    if part == "checks":
        found = check_kernels(bench)
        wrong = [each["name"] for each in found if not each["is_right"]]
        return {"num_checks": len(found), "wrong": wrong, "checks": found}
    return {"kernels": measure_table(bench, measure_ceilings(bench))}


def main() -> int:
    """Write the part's figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("ceilings", "checks", "table"))
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes on the CPU, under TRITON_INTERPRET=1"
    )
    arguments = parser.parse_args()
    if arguments.smoke:
        if os.environ.get("TRITON_INTERPRET") != "1":
            print("--smoke needs TRITON_INTERPRET=1 in the environment", file=sys.stderr)
            return 2
        bench = Bench(torch.device("cpu"), is_smoke=True)
    elif torch.cuda.is_available():
        bench = Bench(torch.device("cuda"), is_smoke=False)
    else:
        print(f"no CUDA device: torch {torch.__version__} sees none", file=sys.stderr)
        return 2
    figures = run_part(arguments.part, bench)
    arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
