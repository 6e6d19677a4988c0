"""Connects the events that change what the chat shows; they run one after the other, each on the result of the last.

press ──▶ wait for the page's opening, and for the event before ──▶ handler ──▶ outputs are on the page ──▶ next event
"""

from __future__ import annotations

from typing import Any

from app.ui.scripts import read_script

QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
# Short events need no queue. By default, Gradio would drop one that comes while another one of its kind is running.
AT_ONCE: dict[str, Any] = {"queue": False, **QUIET}
EACH: dict[str, Any] = {"trigger_mode": "multiple"}

OPEN = f"() => {{\n{read_script('turns')}\n}}"
ENTER = """async (...inputs) => {
while (!globalThis.chatEvents) await new Promise((resume) => setTimeout(resume, 20));
const shown = globalThis.shownChat;
await chatEvents.enter();
"""
# A press at a message does nothing if another chat was opened meanwhile.
STAY = 'if (shownChat !== shown) throw new Error("another chat is open");\n'
LEAVE = "() => chatEvents.leave()"


def run_in_turn(
    event: Any, handler: Any, inputs: Any, outputs: Any, data: str = "inputs", is_of_chat: bool = False
) -> Any:
    """Connect an event whose handler begins when the event before has ended.

    Args:
        data: JavaScript for what the handler gets, from `inputs`.
        is_of_chat: the event belongs to the chat that the page shows when it comes, and ends with it.
    """
    enter = f"{ENTER}{STAY if is_of_chat else ''}return {data};\n}}"
    ran = event(handler, inputs, outputs, js=enter, **EACH, **AT_ONCE)
    for end in (ran.then, ran.failure):
        end(None, js=LEAVE, **EACH, **AT_ONCE)
    return ran
