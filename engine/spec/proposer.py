"""Proposer: what the scheduler asks for drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.core.request import Request


class Proposer(Protocol):
    """Guesses how requests go on. A wrong guess costs time and changes nothing."""

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        """Up to `limit` tokens that may follow the request's known ones; none is fine."""
