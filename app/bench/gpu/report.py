"""The table of `bench gpu`: forty lines at most, every figure beside what it is measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

MAX_LINES = 40
Figures = dict[str, Any]


def report(figures: Figures) -> list[str]:
    """The lines of the table; kernels are left out where they do not fit, with a line that says so."""
    machine, parts = figures["machine"], figures["parts"]
    head = [f"{machine['machine']}, torch {machine['torch']}, {machine['date']}"]
    if figures["is_smoke"]:
        head.append("smoke run on a CPU: the parts work; no figure below says anything about speed")
    body: list[str] = []
    for name, result in parts.items():
        body += _report_part(name, result)
    kernels = _list_kernels(parts.get("table", {}))
    room = MAX_LINES - len(head) - len(body)
    if len(kernels) > room:
        left_out = len(kernels) - max(0, room - 1)
        kernels = [*kernels[: max(0, room - 1)], f"  ... {left_out} more kernels in the JSON"]
    return (head + body + kernels)[:MAX_LINES]


def _report_part(name: str, result: Figures) -> list[str]:
    if result["status"] != "ok":
        last = (result.get("error") or "no message").splitlines()[-1]
        return [f"{name:12}{result['status'].upper()}: {last[:100]}"]
    lines = list(WRITERS.get(name, _report_nothing)(result["figures"]))
    return [f"{name:12}{lines[0]}", *(f"{'':12}{line}" for line in lines[1:])] if lines else []


def _report_nothing(figures: Figures) -> Iterator[str]:
    return iter(())


def _report_ceilings(figures: Figures) -> Iterator[str]:
    yield (
        f"copy {figures['copy_bytes_per_s'] / 1e12:.2f} TB/s, read {figures['read_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"products {figures['gemm_flops_per_s'] / 1e12:.0f} TFLOP/s"
    )


def _report_checks(figures: Figures) -> Iterator[str]:
    wrong = figures["wrong"]
    yield f"{figures['num_checks'] - len(wrong)} of {figures['num_checks']} kernel checks right"
    if wrong:
        yield f"WRONG: {', '.join(wrong)}"[:108]


def _report_parity(figures: Figures) -> Iterator[str]:
    yield f"{figures['num_equal']} of {figures['num_prompts']} answers equal transformers', token for token"


def _report_syncs(figures: Figures) -> Iterator[str]:
    yield figures["verdict"]


def _report_nano(figures: Figures) -> Iterator[str]:
    yield (
        f"{figures['tokens_per_s']:.0f} tok/s, {figures['share_of_measured_ceiling']:.2f} of this device's "
        f"{figures['measured_ceiling']:.0f}, {figures['share_of_h200_ceiling']:.2f} of {figures['h200_ceiling']:.0f}"
    )


def _report_single(figures: Figures) -> Iterator[str]:
    for shape, ms in figures["ms_per_token"].items():
        yield f"{shape}: {ms:.2f} ms a token"


def _report_switches(figures: Figures) -> Iterator[str]:
    rates = figures["tokens_per_s"]
    for name, rate in rates.items():
        yield f"{name}: {rate:.0f} tok/s, {rate / rates['all on']:.2f} of all on"


def _report_idle(figures: Figures) -> Iterator[str]:
    yield figures["verdict"]


def _report_structured(figures: Figures) -> Iterator[str]:
    yield (
        f"{figures['structured_tokens_per_s']:.0f} tok/s with a schema on every row, "
        f"{figures['structured_over_free']:.2f} of free text"
    )


def _report_tune(figures: Figures) -> Iterator[str]:
    yield f"{figures['table']} for kernels/triton/tiles is in the JSON"
    for kind, tried in figures["tried"].items():
        yield f"{kind}: {tried[0]['us']:.0f} us with {tried[0]['tile']}"


def _list_kernels(result: Figures) -> list[str]:
    if result.get("status") != "ok":
        return []
    lines = [f"{'kernel':44}{'us':>10}{'of copy':>9}{'of products':>13}"]
    for row in result["figures"]["kernels"]:
        share = f"{row['share_of_gemm']:.2f}" if row["share_of_gemm"] else ""
        lines.append(f"{row['name'][:43]:44}{row['us']:>10.1f}{row['share_of_copy']:>9.2f}{share:>13}")
    return lines


WRITERS: dict[str, Callable[[Figures], Iterator[str]]] = {
    "ceilings": _report_ceilings,
    "checks": _report_checks,
    "parity": _report_parity,
    "syncs": _report_syncs,
    "nano-0.6b": _report_nano,
    "nano-14b": _report_nano,
    "single": _report_single,
    "switches": _report_switches,
    "idle": _report_idle,
    "structured": _report_structured,
    "tune": _report_tune,
}
