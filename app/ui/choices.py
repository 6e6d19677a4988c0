"""Choices whose options come while the page is open.

After a restart, an open page still has the options of the process before, and Gradio would refuse every event with one
of them. These accept such a value, and their handlers explain it. `allow_custom_value` would let people type values.
They are classes because Gradio makes a component anew for a session that has updated it.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

import gradio as gr
from gradio.component_meta import ComponentMeta


def accept_unknown(component: type[Any]) -> Any:
    """Return a class of choices like `component` that accepts values which are not among its options."""
    body = {
        "__module__": __name__,
        "preprocess": lambda self, payload: payload,
        "is_template": True,  # Gradio draws it as the class above it
    }
    # Past Gradio's own `__new__`, which writes a stub beside this file.
    return ABCMeta.__new__(ComponentMeta, f"Open{component.__name__}", (component,), body)


OpenDropdown = accept_unknown(gr.Dropdown)
OpenRadio = accept_unknown(gr.Radio)
