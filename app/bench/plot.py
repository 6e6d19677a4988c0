"""The picture of simulated replicas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure


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
