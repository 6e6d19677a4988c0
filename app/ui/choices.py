"""Choices whose options come while the page is open."""

from __future__ import annotations

import gradio as gr


def accept_unsent(choice: gr.Dropdown | gr.Radio) -> None:
    """Let a choice take values that Gradio does not know as options, as after a restart of the server.

    The options of an open page are then known to nobody else, and Gradio would refuse every event with one of them.
    The handlers say what a value that is gone means. With `allow_custom_value` people could type values.
    """
    choice.preprocess = lambda payload: payload  # type: ignore[method-assign]
