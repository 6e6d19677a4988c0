"""Explanations of errors for people: what happened, why, and what to do."""

from __future__ import annotations

import html
from dataclasses import dataclass

from app.extraction import TextTooLong
from engine import (
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineSleeping,
    InvalidRequest,
    LeaseRefused,
    PromptTooLong,
    RequestTimeout,
)
from grammar import GrammarError, UnsupportedGrammar

# Errors that the handlers explain; others are bugs and may appear as such.
EXPLAINED = (EngineError, GrammarError)


@dataclass(frozen=True, slots=True)
class Explanation:
    """An explanation of one error."""

    what: str
    why: str
    next_step: str

    def as_html(self) -> str:
        """Return it as HTML, in place of a result or a schema."""
        what, why, next_step = (html.escape(part) for part in (self.what, self.why, self.next_step))
        return f'<div class="problem" role="alert"><b>{what}</b> <span>{why}</span> <em>{next_step}</em></div>'

    def as_markdown(self) -> str:
        return f"**{self.what}** {self.why}\n\n{self.next_step}"

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.next_step) if part)


def explain(error: Exception, engine_state: str = "ready") -> Explanation:
    """Explain an error of the engine or the grammar."""
    why = _sentence(str(error))
    match error:
        case UnsupportedGrammar():
            where = error.pointer or "the root"
            return Explanation(
                f"Unsupported keyword “{error.keyword}” at {where}.",
                _sentence(error.reason),
                "No keyword is ignored silently. Remove it, or express it with other keywords, and run again.",
            )
        case GrammarError():
            return Explanation("This schema or grammar cannot be used.", why, "Correct it and run again.")
        case TextTooLong():
            return Explanation(
                "The text is too long.", why, "Shorten it, or take fields out of the schema, and run again."
            )
        case EngineOverloaded():
            wait = f"{error.retry_after_s:.0f} s" if error.retry_after_s >= 1 else "a moment"
            return Explanation("The queue is full.", why, f"Try again in {wait}.")
        case EngineSleeping():
            return Explanation("The engine sleeps.", why, "The administrator of this app can wake it up.")
        case LeaseRefused():
            return Explanation("No GPU was lent for this.", why, "")
        case RequestTimeout():
            return Explanation("This took too long.", why, "Try again, or ask for fewer tokens.")
        case EngineDead() if engine_state in ("restarting", "starting"):
            return Explanation(
                "The engine is restarting.", why, "It comes back by itself: try again in a few seconds."
            )
        case EngineDead():
            return Explanation("The engine has stopped.", why, "Its log has the cause; restart the app.")
        case InvalidRequest(param="attachment"):
            return Explanation("This file cannot be read.", why, "Attach a text file or a PDF with text in it.")
        case InvalidRequest(param="message"):
            return Explanation("The message is too long.", why, "Shorten it, or attach a part of the file.")
        case PromptTooLong(param="messages"):
            return Explanation(
                "The text is too long for this model.", why, "Shorten it, or load a model with a longer context."
            )
        case InvalidRequest(param="conversation"):
            return Explanation(
                "The conversation is too long.",
                why,
                "Undo a turn, shorten the message or the attachment, or start a new chat.",
            )
        case InvalidRequest(param="model"):
            return Explanation("This model cannot do that.", why, "Choose another model, or start the server with one.")
        case InvalidRequest(param=param):
            field = f" ({param})" if param else ""
            return Explanation(f"This request cannot be served{field}.", why, "Change it and send it again.")
        case _:
            return Explanation("The engine reported an error.", why, "Try again.")


def explain_bug(error: BaseException) -> Explanation:
    """Return the explanation of an unexpected error, shown before the error is logged."""
    return Explanation(
        "This went wrong inside the app.",
        f"It is a bug ({type(error).__name__}); the log of the app has the details.",
        "Change the text or the schema and run again.",
    )


def _sentence(text: str) -> str:
    text = text.strip()
    if not text:
        return ""
    # Show a file name unchanged.
    first = text[0] if "." in text.split()[0].rstrip(".") else text[0].upper()
    return first + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
