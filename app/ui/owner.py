"""Whose objects of the store a page sees, and how long they are kept."""

from __future__ import annotations

import gradio as gr

from app.store import Store
from app.store.objects import GUEST


def find_owner(request: gr.Request) -> str:
    """Return the owner that the gate found; a page without cookie and key is a guest while it is open."""
    info = getattr(request.request, "scope", {}).get("state", {}).get("info")
    return (info.owner if info is not None else "") or f"{GUEST}{request.session_hash}"


def describe_keeping(store: Store, owner: str) -> str:
    """Say where chats are kept, and for how long; for a guest, that nothing is."""
    if owner.startswith(GUEST):
        return (
            "This browser takes no cookie from this page: chats, records, batches and settings are gone when it is "
            "closed. Export, Save and Download make files of them."
        )
    days = f"{store.limits.max_age_s / 86400:,.0f} days after their last change"
    return f"Chats are kept on the server, {days if store.is_kept else 'in memory, until it ends'}."
