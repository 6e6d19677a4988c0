"""One schema object while it is being rewritten."""

from dataclasses import dataclass, field
from typing import Any

from ..plan import NO_EFFECT, PlanEntry
from .keywords import join_pointer


@dataclass(slots=True)
class Node:
    """A schema object, its place in the user's document, and what the rules did to it.

    Attributes:
        schema: the object in its present form; rules edit it in place.
        pointer: where the user wrote it.
        origin: present keyword -> keyword the user wrote, where a rule renamed it.
        drops_ref_siblings: the schema names a draft in which `$ref` stands alone.
        plan: entries of the keywords that no engine has to enforce.
        is_narrowed: its pattern excludes a character that the user's does not.
        moved: pointers under which subschemas no longer stand where the user wrote them.
        conjuncts: place in `allOf` -> present keyword -> the user's, of what a rule put there.
    """

    schema: dict[str, Any]
    pointer: str
    drops_ref_siblings: bool = False
    origin: dict[str, str] = field(default_factory=dict)
    plan: list[PlanEntry] = field(default_factory=list)
    is_narrowed: bool = False
    moved: list[str] = field(default_factory=list)
    conjuncts: dict[int, dict[str, str]] = field(default_factory=dict)

    def drop(self, keyword: str, why: str = NO_EFFECT) -> None:
        """Remove a keyword that asserts nothing and say so in the plan."""
        del self.schema[keyword]
        name = self.original_name(keyword)
        self.plan.append(PlanEntry(self.pointer, name, why))
        self.moved.append(join_pointer(self.pointer, name))

    def rename(self, old: str, new: str, value: Any) -> None:
        """Replace a keyword by another form of it, in place, so that the order of keys is kept."""
        items = [(new, value) if key == old else (key, kept) for key, kept in self.schema.items()]
        self.schema.clear()
        self.schema.update(items)
        name = self.original_name(old)
        self.origin[new] = name
        if old != new:
            self.moved.append(join_pointer(self.pointer, name))

    def original_name(self, keyword: str) -> str:
        """Return the keyword the user wrote."""
        return self.origin.get(keyword, keyword)
