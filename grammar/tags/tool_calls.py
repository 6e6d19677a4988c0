"""Tool calls as one Lark grammar: only the tools that exist, with arguments that fit their schemas, in a model's form.

The text between values is written as literals and free text as lexemes that end with a mark, so that llguidance's
lexer, which takes the longest lexeme, always knows where a part ends. Each different schema is a grammar of its own.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from ..engines.llguidance_backend import LLGuidanceBackend
from ..engines.llguidance_json import join_lark
from ..errors import InvalidGrammar, UnsupportedGrammar
from ..regex.dialects import read_classes
from ..regex.text import escape, quote, write_terminal
from ..spec import GrammarSpec, dump_json
from .argument_writer import ArgumentWriter
from .free_text import ANY
from .lark_text import IDS, LarkText
from .leaves import LeafWriter
from .tool_styles import ANSWER, MESSAGES, ToolStyle

Json = dict[str, Any]
NAME: Literal["tool_calls"] = "tool_calls"
MAX_CALLS = 16  # of an answer that has to call
_ROOT = re.compile(r".*/(?:\$defs|definitions)/root(?=/)")
_COPIED = re.compile(r"^/(?:properties/[^/]+|additionalProperties)(?=/(?:\$defs|definitions)/)")
_MISTRAL_ID = "/[A-Za-z0-9]{9}/"


def make_tool_spec(
    style: ToolStyle, tools: Sequence[tuple[str, Mapping[str, Any]]], is_forced: bool = False,
    is_parallel: bool = True, answer: GrammarSpec | None = None,
) -> GrammarSpec:
    """Return the grammar of an answer that may call tools.

    Args:
        tools: the name and the schema of the arguments of each; the schemas are well formed.
        is_forced: the answer is calls and nothing else.
        is_parallel: whether there may be more than one call.
        answer: an answer without calls; None for any text, which may also stand beside calls.
    """
    if not tools:
        raise InvalidGrammar("tool calls need at least one tool")
    given = None if answer is None else {"kind": answer.kind, "text": answer.text, "order": answer.property_order}
    described = {
        "style": asdict(style), "tools": [*map(list, tools)], "is_forced": is_forced, "is_parallel": is_parallel,
        "answer": given,
    }  # fmt: skip
    options = () if answer is None else (answer.whitespace, answer.backend)
    return GrammarSpec(NAME, dump_json(described, "tools"), *options)


def read_style(described: Mapping[str, Any]) -> ToolStyle:
    fields: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in described.items()}
    return ToolStyle(**fields)


class ToolWriter:
    """Writes the grammar of one description of tool calls.

    Attributes:
        leaves: the values with grammars of their own.
    """

    has_rules, is_bounded = False, True  # as of `TagText`

    def __init__(self, spec: GrammarSpec, backend: LLGuidanceBackend, make_leaves: partial[LeafWriter]) -> None:
        self._described = described = spec.document
        self.style = style = read_style(described["style"])
        self._tools: list[tuple[str, Json]] = described["tools"]
        self._is_parallel: bool = described["is_parallel"]
        self._whitespace = spec.whitespace
        specials = backend.vocabulary.special_tokens
        written = json.dumps(described["style"], ensure_ascii=False).replace('\\"', '"')
        named = {name: specials[name] for name in sorted(specials, key=len, reverse=True) if name in written}
        # Mistral's templates take ids of nine letters and digits only.
        self._text = LarkText(named, _MISTRAL_ID if "[TOOL_CALLS]" in style.openings[0] else IDS["{id}"])
        self.leaves = make_leaves(self._text)
        self.arguments = ArgumentWriter(self._text, style, spec.whitespace, self.leaves)
        self._arguments: list[str] = []

    def write(self) -> str:
        """Return the whole grammar in llguidance's format.

        Raises:
            UnsupportedGrammar: a schema cannot be enforced in this form.
        """
        described = self._described
        calls = [self._write_call(index) for index in range(len(self._tools))]
        self._text.rules["calls"] = " | ".join(calls)
        if "" in self.style.openings and not self.style.channel:
            marks = dict.fromkeys(cut_mark(head.partition("{name}")[0]) for head in self.style.heads)
            known = [f"{self._text.literal(mark)} {self._write_known(mark)}" for mark in marks]
            self._text.rules["calls"] = " | ".join(known)
        if self.style.channel:
            start = self._write_messages(described)
        elif described["is_forced"]:
            start = self._write_sections(MAX_CALLS)
        elif described["answer"] is not None or self.style.is_whole:
            start = self._write_whole(described["answer"])
        else:
            start = self._write_among_text()
        return join_lark(self._text.write(start), self.leaves.list_grammars())

    def _write_sections(self, max_calls: int | None) -> str:
        """Return the expression of one section of calls, or of several in a row."""
        style = self.style
        section = self._text.share("section", lambda: " | ".join(self._write_section(each) for each in style.openings))
        has_end = bool(style.end or style.tail.strip("}"))
        if style.separator is not None or not (style.is_repeated and self._is_parallel and has_end):
            return section
        gap = f"{self._text.name(quote(chr(10)))}?"
        return f"{section} ({gap} {section})" + (f"{{0,{max_calls - 1}}}" if max_calls else "*") + f" {gap}"

    def _write_section(self, opening: str) -> str:
        """Return the expression of a section from what is left of its opening on."""
        style, more = self.style, ""
        tail = self._text.share("tail", lambda: self._text.template(style.tail) or '""')
        if style.separator is not None and self._is_parallel:
            # A separator that the end begins with is a part of the literal behind it.
            start = style.separator if style.end.startswith(style.separator or "\0") else ""
            later = "calls"
            if start:
                later = self._text.share("later", lambda: self._write_after([start + head for head in style.heads]))
            more = f"({tail} {'' if start else self._text.literal(style.separator)} {later})"
            more += f"{{0,{MAX_CALLS - 1}}}" if self._described["is_forced"] else "*"
        return f"{self._text.literal(opening)} calls {more} {tail} {self._text.literal(style.end)}"

    def _write_whole(self, answer: Json | None) -> str:
        """Return the expression of an answer that is either calls or something else."""
        starts = {opening[0] for opening in self.style.openings if opening}
        excluded = "".join(map(escape, sorted(starts)))
        text = self._text.name(f"/[^{excluded}](?s:.*)/") + "?" if answer is None else self._write_answer(answer)
        sections = [self._write_section(each) for each in self.style.openings if each]
        self._text.rules["section"] = " | ".join(sections)
        return f"{text} | {self._write_sections(None)}" if sections else text

    def _write_answer(self, answer: Json) -> str:
        if answer["kind"] == "choice":
            return "(" + " | ".join(self._text.name(quote(each)) for each in json.loads(answer["text"])) + ")"
        if answer["kind"] == "regex":
            return self._text.name(write_terminal(read_classes(answer["text"])))
        leaf = GrammarSpec(answer["kind"], answer["text"], self._whitespace, property_order=answer["order"])
        return self.arguments.write_leaf(leaf, "/answer", "")

    def _write_among_text(self) -> str:
        style = self.style
        is_again = style.is_repeated and self._is_parallel
        ways: list[tuple[str, str]] = []
        for mark in dict.fromkeys(map(cut_mark, style.marks)):
            openings = [each for each in style.openings if each and each.startswith(mark)]
            if openings:
                sections = [self._write_section(each.removeprefix(mark)) for each in openings]
                ways.append((mark, f"({' | '.join(sections)}) {'text' if is_again else ''}"))
            else:
                ways.append((mark, self._write_unmarked(mark, is_again)))
        self._text.rules["text"] = self._text.until(ways, "")
        return "text"

    def _write_unmarked(self, mark: str, is_again: bool) -> str:
        """Return what follows the beginning of a call's head: a known name goes on as a call, another one as text."""
        calls = self._write_known(mark)
        rests = [head.removeprefix(mark).partition("{name}")[0] for head in self.style.heads if head.startswith(mark)]
        names = " | ".join(quote(f'{rest}{name}"') for rest in rests for name, _ in self._tools)
        other = self._text.name(f"{ANY} & ~(({names}) {ANY})")
        tail = self._text.share("tail", lambda: self._text.template(self.style.tail) or '""')
        return f"({calls} {tail} {self._text.literal(self.style.end)} {'text' if is_again else ''} | {other})"

    def _write_known(self, mark: str) -> str:
        """Return the rule of what follows the beginning of a head that all calls have."""
        heads = [head.removeprefix(mark) for head in self.style.heads if head.startswith(mark)]
        return self._text.share(f"after{self._text.key(repr(heads))}", lambda: self._write_after(heads))

    def _write_after(self, heads: Sequence[str]) -> str:
        """Return the expression of all calls from their names on."""
        pairs = zip(self._tools, self._arguments, strict=True)
        return " | ".join(
            f"({' | '.join(self._text.template(head, name) for head in heads)}) {rule}" for (name, _), rule in pairs
        )

    def _write_messages(self, described: Json) -> str:
        style, answer = self.style, described["answer"]
        begins = [self._text.literal(style.channel.replace("{channel}", name)) for name in (*MESSAGES, ANSWER)]
        before, token, after = self._text.split(style.next_message)
        message = self._text.until([(before + (token or ""), self._text.literal(after))])
        before = " | ".join(f"{begin} {message}" for begin in begins[:-1])
        final = f"{self._text.name('/(?s:.+)/')}?" if answer is None else self._write_answer(answer)
        last = "" if described["is_forced"] else f"{begins[-1]} {final} | "
        return f"({before})* ({last}{self._write_sections(1)})"

    # Calls and their arguments

    def _write_call(self, index: int) -> str:
        """Return the expression of a call up to the end of its arguments."""
        name, schema = self._tools[index]
        place = f"/tools/{index}/parameters"
        try:
            body = self.arguments.write_object(schema, place)
        except UnsupportedGrammar as error:
            # An argument's schema is a document of its own, with the definitions of the whole.
            pointer = _COPIED.sub("", _ROOT.sub("", error.pointer))
            raise UnsupportedGrammar(place + pointer, error.keyword, error.reason) from error
        except InvalidGrammar as error:
            raise InvalidGrammar(f"{place}: {error}") from error
        arguments = self._text.rule(body or '""')
        self._arguments.append(arguments)
        return f"({' | '.join(self._text.template(head, name) for head in self.style.heads)}) {arguments}"


def cut_mark(mark: str) -> str:
    """Return the beginning of a mark whose last character stands only there, so that text before it has quick masks."""
    return mark[: mark.index(":") + 1] if mark.startswith("{") and ":" in mark else mark
