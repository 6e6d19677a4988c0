"""The table of `bench gpu`: at most forty lines, every figure beside its reference."""

from __future__ import annotations

from typing import Any

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
