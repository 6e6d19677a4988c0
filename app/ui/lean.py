"""What Gradio does again and again, made cheap for a page that does not change: all of it runs between two tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import gradio as gr
from gradio.blocks import Block

# A mounted app otherwise runs 40 events at once, whatever the concurrency limits say.
MAX_EVENTS = 1024
# How often Gradio looks for new events. Its own 1 ms keeps 7 % of a core busy while nobody is there.
LOOK_S = 0.03
# How often it looks through all places for events whether one reports progress; no handler here does.
PROGRESS_LOOK_S = 1.0
DESCRIPTIONS = ("api_info", "api_info_as_input", "api_info_as_output")


def make_lean(demo: gr.Blocks) -> None:
    """Call it once, when the page is finished."""
    demo.queue(default_concurrency_limit=None)
    queue = demo._queue
    queue.max_thread_count = MAX_EVENTS
    queue.sleep_when_free, queue.progress_update_sleep_when_free = LOOK_S, PROGRESS_LOOK_S
    # After that many events Gradio makes a table of all of them in a thread; nobody reads it here.
    queue.ANAYLTICS_CACHE_FREQUENCY = 2**31
    queue.ANALYTICS_MAX_EVENTS = 1
    # Around every update of every page it sets matplotlib up, or looks for it in vain; nothing here is plotted so.
    gr.utils.MatplotlibBackendMananger = nullcontext  # type: ignore[assignment, misc]
    describe_once(demo)


def describe_once(demo: gr.Blocks) -> None:
    """Let the components keep their descriptions.

    Each session holds a description of every component. Gradio makes them anew when a page opens: it inspects
    signatures and generates JSON schemas, for 25 ms, and leaves thousands of objects to the garbage collector. What
    a handler changes in one session is a new component, which describes itself.
    """
    for block in demo.blocks.values():
        if hasattr(block, "get_config"):
            keep(block, "get_config")
        if not block.skip_api:
            for name in DESCRIPTIONS:
                if hasattr(block, name):
                    keep(block, name)


def keep(block: Block, name: str) -> None:
    """Replace a method that returns a dictionary by what it returns now. Callers may add keys to what they get."""
    description: dict[str, Any] = getattr(block, name)()
    copy: Callable[..., dict[str, Any]] = description.copy
    setattr(block, name, lambda *_: copy())
