"""Proposer: the interface of sources that propose drafts on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.core.request import Request


class Proposer(Protocol):
    """Predicts the next tokens of requests. A wrong draft costs time but does not change the text."""

    @property
    def name(self) -> str:
        """The label of its drafts in metrics."""

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        """Return 0 to `limit` tokens that may follow the request's known tokens."""

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
