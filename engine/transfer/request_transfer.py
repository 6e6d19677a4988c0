"""RequestTransfer: one request's state in BlockTransfers. In a file of its own, because Request holds it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestTransfer:
    """The request may run when `is_settled`."""

    is_settled: bool = False
    num_saved: int = 0  # leading blocks of each group that the store has, or that are being saved
    unit_hashes: list[bytes] = field(default_factory=list)  # if blocks are larger than units
