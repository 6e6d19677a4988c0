"""Proposer: the interface for proposing draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.core.request import Request


class Proposer(Protocol):
    """Predicts the next tokens of requests. A wrong draft costs time but does not change the text."""

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        """Return 0 to `limit` tokens that may follow the request's known tokens."""
