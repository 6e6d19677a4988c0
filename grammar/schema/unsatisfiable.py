"""Definitions that nothing satisfies: llguidance refuses a whole schema for one, even where it may stay away.

Written in place, such a schema is a property that is absent or a branch that is not taken. So `false` takes the
place of the references to it.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from .keywords import split_pointer
from .references import find_targets, map_schemas
from .refusal import SIGN, explain_contradiction
from .weaken import find_at

Schema = dict[str, Any]
# Returns an engine's complaint about a schema, "" for none.
Probe = Callable[[Any], str]

MAX_NUM_PROBES = 200
_SHARED = ("$defs", "definitions")


def close_unsatisfiable(schema: Schema, probe: Probe) -> Schema | bool | None:
    """Return the schema with `false` for each reference to what nothing satisfies; None where there is none."""
    targets = list(find_all_targets(schema))
    # Reference target -> what stands in its place: false, or true as long as it is not known; None leaves it.
    verdicts: dict[str, bool | None] = dict.fromkeys(targets, True)
    num_probes, is_changed, is_deep = 0, True, False

    def count(part: Any) -> str:
        nonlocal num_probes
        num_probes += 1
        return probe(part)

    while is_changed or not is_deep:
        # Only where definitions wait for each other is what each of them says looked at too.
        is_changed, is_deep = False, not is_changed
        known = dict(verdicts) if is_deep else verdicts
        for target in [target for target in targets if verdicts[target] is True]:
            if num_probes >= MAX_NUM_PROBES:
                return None
            verdict = judge(schema, target, known, count, is_deep)
            is_changed |= verdict is not True
            verdicts[target] = verdict
    if False not in verdicts.values():
        return None
    closed = {target: False for target in targets if verdicts[target] is False}
    return replace_references(schema, closed)


def close_in_place(schema: Schema, message: str, probe: Probe) -> Schema | None:
    """Return the schema with `false` for the place that a complaint is about, None where all of it is.

    In any order of properties, the schemas at several places are compiled by themselves.
    """
    if probe(schema).startswith(SIGN):
        return None
    pointer = explain_contradiction(schema, message, probe).pointer
    if not pointer:
        return None
    closed = copy.deepcopy(schema)
    *above, last = split_pointer(pointer)
    parent: Any = closed
    for part in above:
        parent = parent[int(part)] if isinstance(parent, list) else parent[part]
    if isinstance(parent, list):
        parent[int(last)] = False
    else:
        parent[last] = False
    return closed


def judge(
    schema: Schema, target: str, verdicts: dict[str, bool | None], probe: Probe, is_deep: bool
) -> bool | None:
    """Return whether something satisfies a target: False, None for yes, True where that is not known yet.

    What is not known is taken for `true`, of which it can only be a part.

    Args:
        is_deep: only what is not known to the definitions that the target refers to is. Alone, something satisfies
            each of them.
    """
    found = find_at(schema, target)
    if isinstance(found, bool):
        return None if found else False
    if not isinstance(found, dict):
        return None
    shared = {name: schema[name] for name in _SHARED if name in schema}
    settled = {name: verdict for name, verdict in verdicts.items() if verdict is not True}
    alone = replace_references({**found, **shared}, settled)
    if isinstance(alone, dict) and not probe(alone):
        return None
    own = replace_references(found, settled if is_deep else verdicts)
    if own is False:
        return False
    if isinstance(own, dict) and probe({**own, **replace_references(shared, verdicts)}).startswith(SIGN):
        return False
    return True if any(verdicts.get(name) is True for name in find_all_targets(found)) else None


def find_all_targets(value: Any) -> dict[str, None]:
    """Return where the local references in a document lead."""
    found: dict[str, None] = {}
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            found.update(dict.fromkeys(find_targets(node)))
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
    return found


def replace_references(value: Any, verdicts: Mapping[str, bool | None]) -> Any:
    """Return a document with `true` or `false` in place of some references."""

    def replace(schema: Schema) -> Schema | bool:
        target = next(find_targets(schema), None)
        verdict = None if target is None else verdicts.get(target)
        if verdict is True:
            del schema["$ref"]
        return False if verdict is False else schema

    return map_schemas(value, replace)
