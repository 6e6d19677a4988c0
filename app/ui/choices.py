"""Choices whose options come while the page is open."""

from __future__ import annotations

import gradio as gr


def accept_unsent(choice: gr.Dropdown | gr.Radio) -> None:
    """Let a choice accept values that are not among the options of this process.

    After a restart, an open page still has the options of the process before, and Gradio would refuse every event with
    one of them. The handlers explain a value that no longer exists. `allow_custom_value` would let people type values.
    """
    choice.preprocess = lambda payload: payload  # type: ignore[method-assign]
