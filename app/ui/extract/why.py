"""Why a value is what it is: its place in the text, what the model weighed, and checks, as HTML."""

from __future__ import annotations

import html

from app.ui.extract.record_view import show_path, spell
from app.ui.extract.shown import Shown


def render_why(shown: Shown, pointer: str) -> str:
    """Return the reasons for a value: its place in the text, the alternatives that the model weighed, failed checks."""
    leaf = next((each for each in shown.result.leaves if each.pointer == pointer), None)
    if leaf is None:
        return ""
    evidence = shown.result.evidence.get(pointer)
    reasons = shown.reasons.get(pointer, ())
    facts = [("Check", html.escape("; ".join(reasons)))] if reasons else []
    if evidence is not None:
        quote = f"<bdi>“{html.escape(evidence.quote[:160])}”</bdi>"
        where = {"exact": quote, "normalised": f"{quote}, written differently"}.get(evidence.match, "not found")
        facts.append(("In the text", where))
    choice = shown.choices.get(shown.origin.get(pointer, ""))
    if pointer in shown.by_hand:
        facts.append(("Typed by you", _render_undo(shown, pointer)))
    if choice is not None:
        facts.append(("The model weighed", " · ".join(map(_render_weighed, (choice.taken, *choice.rivals)))))
        if choice.forbidden:
            facts.append(("The schema forbade", " · ".join(map(_render_weighed, choice.forbidden))))
    elif pointer in shown.origin and shown.drafted.output is not None:
        facts.append(("The model", "had no choice: the schema allows nothing else here"))
    checks = [each for each in shown.result.checks if pointer in each.pointers and each.message not in reasons]
    facts += [("Adds up" if check.holds else "Does not add up", html.escape(check.message)) for check in checks]
    rows = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in facts)
    return f'<div class="why"><h2>Why <b>{show_path(leaf.path) or "this value"}</b>?</h2><dl>{rows}</dl></div>'


def _render_undo(shown: Shown, pointer: str) -> str:
    draft = next((each for each in shown.drafted.leaves if each.pointer == shown.origin.get(pointer)), None)
    if draft is None:
        return "the model wrote nothing here"
    place = html.escape(pointer, quote=True)
    return (
        f"the model wrote <code>{html.escape(spell(draft))}</code> "
        f'<button type="button" data-act="undo" data-pointer="{place}">Undo</button>'
    )


def _render_weighed(weighed: tuple[str, float]) -> str:
    text, share = weighed
    percent = "< 0.1%" if share < 0.001 else f"{share:.1%}" if share < 0.9995 else "100%"
    return f"<span><bdi><code>{html.escape(text)}</code></bdi> {percent}</span>"
