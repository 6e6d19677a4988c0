"""The picture of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure


def draw_frontier(points: Sequence[tuple[float, float, int]], knee: int, path: Path) -> None:
    """Draw throughput over latency as a PNG.

    Args:
        points: (TPOT in milliseconds, output tokens a second, concurrency).
        knee: concurrency of the point to name.
    """
    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", color="#4f46e5")
    for x, y, count in points:
        is_knee = count == knee
        axes.annotate(
            f"{count} (knee)" if is_knee else str(count), (x, y), xytext=(6, -12), textcoords="offset points",
            fontsize=9, fontweight="bold" if is_knee else "normal", color="#b91c1c" if is_knee else "#374151",
        )  # fmt: skip
    axes.set_xlabel("time per output token, median (ms)")
    axes.set_ylabel("output tokens per second")
    axes.set_title("Throughput and latency; numbers are requests at a time")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png")


def draw_replicas(
    points: Sequence[tuple[str, int, float, float]], ttft_ms: float, itl_ms: float, path: Path
) -> None:
    """Draw the times of simulations over the number of replicas as a PNG.

    Args:
        points: (policy, number of replicas, TTFT, ITL), times in milliseconds at the asked percentile.
        ttft_ms, itl_ms: limits, drawn as lines.
    """
    figure = Figure(figsize=(9, 4.5), dpi=150, layout="constrained")
    for axes, column, name, limit in zip(
        figure.subplots(1, 2), (2, 3), ("TTFT", "ITL"), (ttft_ms, itl_ms), strict=True
    ):
        for policy in dict.fromkeys(point[0] for point in points):
            own = [point for point in points if point[0] == policy]
            axes.plot([p[1] for p in own], [p[column] for p in own], marker="o", label=policy)
        axes.axhline(limit, color="#b91c1c", linestyle="--", label="limit")
        axes.set_xlabel("replicas")
        axes.set_ylabel(f"{name} (ms)")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, format="png")
