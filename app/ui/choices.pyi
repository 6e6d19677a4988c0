"""Choices whose options come while the page is open.

After a restart, an open page still has the options of the process before, and Gradio would refuse every event with one of
them. These components accept such a value; their handlers explain it. `allow_custom_value` would let people type values.
They are classes because Gradio makes a component anew for a session that has updated it.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from gradio.events import Dependency

class OpenDropdown(gr.Dropdown):
    """A dropdown that accepts values that are not among its options."""

    is_template = True  # Gradio draws it as the class above it

    def preprocess(self, payload: Any) -> Any:
        """Return the value as the page sent it."""
        return payload
    from typing import Callable, Literal, Sequence, Any, TYPE_CHECKING
    from gradio.blocks import Block
    if TYPE_CHECKING:
        from gradio.components import Timer
        from gradio.components.base import Component


class OpenRadio(gr.Radio):
    """A row of choices that accepts values that are not among its options."""

    is_template = True

    def preprocess(self, payload: Any) -> Any:
        """Return the value as the page sent it."""
        return payload
    from typing import Callable, Literal, Sequence, Any, TYPE_CHECKING
    from gradio.blocks import Block
    if TYPE_CHECKING:
        from gradio.components import Timer
        from gradio.components.base import Component