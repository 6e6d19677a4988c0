"""Makes Gradio's repeated work cheap for a page that never changes. That work delays tokens on the event loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import gradio as gr
from gradio.blocks import Block

# A mounted app runs at most 40 events at once by default, regardless of the concurrency limits.
MAX_EVENTS = 1024
# Seconds between Gradio's polls for new events. Its default of 1 ms keeps 7 % of a core busy without any visitor.
LOOK_S = 0.03
# Seconds between polls of all events for progress; no handler here reports progress.
PROGRESS_LOOK_S = 1.0
DESCRIPTIONS = ("api_info", "api_info_as_input", "api_info_as_output")


def make_lean(demo: gr.Blocks) -> None:
    """Apply all settings. Call it once, when the page is complete."""
    demo.queue(default_concurrency_limit=None)
    queue = demo._queue
    queue.max_thread_count = MAX_EVENTS
    queue.sleep_when_free, queue.progress_update_sleep_when_free = LOOK_S, PROGRESS_LOOK_S
    hide_progress(demo)
    # Turn off the table of all events that Gradio computes in a thread from time to time; it is unused here.
    queue.ANAYLTICS_CACHE_FREQUENCY = 2**31
    queue.ANALYTICS_MAX_EVENTS = 1
    # Gradio sets up matplotlib around every update, or tries to import it; this page does not use matplotlib.
    gr.utils.MatplotlibBackendMananger = nullcontext  # type: ignore[assignment, misc]
    describe_once(demo)


def hide_progress(demo: gr.Blocks) -> None:
    """Keep the state of events without a progress display from their components.

    With every update of a growing answer the browser otherwise takes the state of all events to all their components.
    """
    for function in demo.fns.values():
        if function.show_progress == "hidden":
            function.show_progress_on = []


def describe_once(demo: gr.Blocks) -> None:
    """Cache the descriptions of the components.

    Gradio describes every component again for each page that opens. It inspects signatures and generates JSON
    schemas, which takes 25 ms and creates thousands of objects for the garbage collector. When a handler changes a
    component, the session gets a new one with its own description.
    """
    for block in demo.blocks.values():
        if hasattr(block, "get_config"):
            keep(block, "get_config")
        if not block.skip_api:
            for name in DESCRIPTIONS:
                if hasattr(block, name):
                    keep(block, name)


def keep(block: Block, name: str) -> None:
    """Cache the dictionary that a method returns. Each call returns a copy, because callers add keys to it."""
    description: dict[str, Any] = getattr(block, name)()
    copy: Callable[..., dict[str, Any]] = description.copy
    setattr(block, name, lambda *_: copy())
