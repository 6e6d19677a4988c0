"""What a class says is read as Pydantic itself reads it, and what is not understood is refused, never dropped."""

from pathlib import Path
from typing import Any

import pytest

from app.ui.schema import CodeError, pydantic_to_schema
from tests.app.ui.schema.classes import load_record, simplify

IMPORTS = """
import enum
from enum import Enum, IntEnum, StrEnum
import typing
from typing import Annotated, ClassVar, Dict, Literal, Optional, Union
import annotated_types
import pydantic
from annotated_types import Ge, Gt, Interval, Le, Len, Lt, MaxLen, MinLen, MultipleOf
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
class Closed(BaseModel, extra="forbid"): pass
"""
SAME = {
    "inherited fields come first": "class P(Closed):\n  b: int\n  a: str = Field(max_length=3)\nclass R(P):\n  c: int",
    "an overridden field keeps its place": (
        "class P(Closed):\n  a: int\n  b: int\nclass R(P):\n  c: int\n  a: str = 'x'"
    ),
    "two bases": "class P(Closed):\n  a: int\n  z: int\nclass Q(Closed):\n  a: str\n  b: int\nclass R(P, Q):\n  c: int",
    "two bases of one": (
        "class O(Closed):\n  a: int\nclass P(O):\n  p: int\nclass Q(O):\n  a: str\nclass R(P, Q):\n  c: int"
    ),
    "pydantic.BaseModel": "class P(pydantic.BaseModel, extra='forbid'):\n  a: int\nclass R(P):\n  pass",
    "a base's docstring is its own": "class P(Closed):\n  'P.'\n  a: int\nclass R(P):\n  pass",
    "tuple": "class R(Closed):\n  x: tuple[int, str]\n  y: tuple[str] | None = None",
    "tuple in a list": "class R(Closed):\n  x: list[tuple[str, int, bool]]",
    "tuple of any length": "class R(Closed):\n  x: tuple[int, ...] = Field(max_length=4)",
    "set": "class R(Closed):\n  x: set[str] = Field(max_length=4)\n  y: frozenset[int] | None = None",
    "Union": (
        "class R(Closed):\n  a: Union[int, str]\n  b: Union[str, None] = None\n  c: typing.Union[int, str, None]\n"
        "  d: Optional[Union[int, list[str]]]\n  e: Union[int]\n  f: int | Union[str, bool] | None"
    ),
    "dict": (
        "class P(Closed):\n  a: int\n"
        "class R(Closed):\n  a: dict[str, int]\n  b: Dict[str, P] | None = None\n  c: list[dict[str, list[str]]]\n"
        "  d: dict[str, int] = Field(min_length=1, max_length=4)"
    ),
    "marks": (
        "class R(Closed):\n  a: Annotated[int, Gt(3), Lt(lt=9)]\n  b: Annotated[float, Ge(0), Le(1)] = 0.5\n"
        "  c: Annotated[int, annotated_types.MultipleOf(3)]\n  d: Annotated[int, Interval(gt=1, le=4)]"
    ),
    "marks of length": (
        "class R(Closed):\n  a: Annotated[str, MinLen(1), MaxLen(5)]\n  b: Annotated[list[int], Len(1, 2)]\n"
        "  c: Annotated[set[str], Len(2)]\n  d: Annotated[str, Len(1, max_length=None)]"
    ),
    "marks inside a type": "class R(Closed):\n  a: list[Annotated[int, Gt(3)]]\n  b: Annotated[int, Gt(3)] | None",
    "marks in marks": "class R(Closed):\n  a: Annotated[Annotated[int, Gt(1)], Lt(5)]",
    "StringConstraints": "class R(Closed):\n  a: Annotated[str, StringConstraints(max_length=3, pattern='a')]",
    "members with a type": "class E(Enum):\n  A: str = 'a'\n  B = 'b'\nclass R(Closed):\n  x: E",
    "whole numbers": "class E(Enum):\n  A = 1\n  B = 2\nclass R(Closed):\n  x: E\n  y: Literal[3, 4]",
    "IntEnum": "class E(IntEnum):\n  A = 1\n  B = 2\nclass R(Closed):\n  x: E",
    "str and Enum": "class E(str, enum.Enum):\n  'Kinds.'\n  A = 'a'\n  B = 'b'\nclass R(Closed):\n  x: E",
    "StrEnum with a method": (
        "class E(StrEnum):\n  A = 'a'\n  B = 'b'\n  def f(self): return 1\nclass R(Closed):\n  x: E"
    ),
    "alias": "class R(Closed):\n  x: int = Field(alias='b c')\n  y: Annotated[int, Field(alias='z')] = 3",
    "validation_alias": (
        "class R(Closed):\n  x: int = Field(validation_alias='b', alias='c')\n  y: int = Field(alias=None)"
    ),
    "an inherited alias": "class P(Closed):\n  x: int = Field(alias='b')\nclass R(P):\n  y: int",
    "a default that is none": (
        "class R(Closed):\n  x: int = Field(default=...)\n  y: int = Field(..., ge=3)\n  z: int = ..."
    ),
    "a default in Annotated": "class R(Closed):\n  x: Annotated[int, Field(default=3)]\n  y: Annotated[int, Gt(3)] = 4",
    "pydantic.Field": "class R(Closed):\n  x: int = pydantic.Field(ge=3)",
    "limits that are None": "class R(Closed):\n  x: str = Field(min_length=None, description=None)",
    "a length beside null": "class R(Closed):\n  x: None | list[str] = Field(min_length=2)",
    "allow in a dict": "class R(BaseModel):\n  model_config = {'extra': 'allow', 'frozen': True}\n  a: int",
    "ignore": "class R(BaseModel):\n  model_config = ConfigDict(extra='ignore')\n  a: int",
    "forbid": "class R(BaseModel):\n  model_config = pydantic.ConfigDict(extra='forbid')\n  a: int",
    "allow behind the base": (
        "class R(BaseModel, extra='allow'):\n  model_config = ConfigDict(extra='forbid')\n  a: int"
    ),
    "an annotated configuration": (
        "class R(BaseModel):\n  model_config: ClassVar[ConfigDict] = ConfigDict(extra='allow')\n  a: int"
    ),
    "an inherited configuration": "class P(BaseModel, extra='allow'):\n  a: int\nclass R(P):\n  b: int",
    "two inherited configurations": (
        "class P(BaseModel, extra='allow'):\n  a: int\nclass Q(BaseModel, extra='ignore'):\n  b: int\n"
        "class R(Q, P):\n  c: int"
    ),
    "an open class inside": "class P(BaseModel, extra='allow'):\n  a: int\nclass R(Closed):\n  p: list[P]",
}  # fmt: skip


@pytest.mark.parametrize("code", SAME.values(), ids=SAME)
def test_a_class_is_read_as_pydantic_reads_it(code: str, tmp_path: Path) -> None:
    found = pydantic_to_schema(IMPORTS + code)
    wanted = load_record(IMPORTS + code, tmp_path).model_json_schema()
    assert simplify(found) == simplify(wanted)
    assert list(found["properties"]) == list(wanted["properties"])


def test_marks_and_alias_of_a_type_in_quotes_are_read() -> None:
    schema = pydantic_to_schema("class A(BaseModel):\n  x: 'Annotated[int, Gt(1), Field(alias=\"b\")]'")
    assert schema["properties"] == {"b": {"type": "integer", "exclusiveMinimum": 1}}


def test_the_title_of_the_configuration_is_the_schema_s() -> None:
    assert pydantic_to_schema("class A(BaseModel, title='Bill'):\n  x: int")["title"] == "Bill"


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("Annotated[int, Ge(4), Field(ge=3)] = Field(ge=2)", {"type": "integer", "minimum": 4}),
        ("Annotated[int, Lt(3), Lt(5)]", {"type": "integer", "exclusiveMaximum": 3}),
        ("str | list[int] = Field(min_length=2)", {"minLength": 2, "minItems": 2}),
        (
            "Annotated[int | str, Gt(3)] | None",
            {
                "anyOf": [
                    {"anyOf": [{"type": "integer"}, {"type": "string"}], "exclusiveMinimum": 3},
                    {"type": "null"},
                ]
            },
        ),
    ],
)
def test_no_limit_is_lost(field: str, wanted: dict[str, Any]) -> None:
    """Pydantic's own schema tells less here than its classes check."""
    found = pydantic_to_schema(f"class A(BaseModel):\n  x: {field}")["properties"]["x"]
    assert wanted.items() <= found.items()


def test_a_tuple_keeps_its_length_beside_a_looser_limit() -> None:
    found = pydantic_to_schema(
        "class A(BaseModel):\n  x: tuple[int, str] = Field(min_length=1, max_length=9)"
    )
    assert (found["properties"]["x"]["minItems"], found["properties"]["x"]["maxItems"]) == (2, 2)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("class A(Person):\n  x: int", "line 1: the base class `Person` is not known"),
        ("class A(BaseModel, Generic[T]):\n  x: int", "`Generic"),
        ("class E(Enum):\n  A = 1\nclass A(E):\n  x: int", "line 3: the base class `E`"),
        ("class A(B):\n  x: int\nclass B(A):\n  y: int", "contains itself"),
        ("class E(Flag, Enum):\n  A = 1\nclass A(BaseModel):\n  x: E", "line 1: the base class `Flag`"),
        ("class E(Enum):\n  def f(self): pass\nclass A(BaseModel):\n  x: E", "E has no members"),
        ("class E(Enum):\n  A, B = 'a', 'b'\nclass A(BaseModel):\n  x: E", "line 2: .* no member"),
        ("class E(int, Enum):\n  A = '1'\nclass A(BaseModel):\n  x: E", "not all of type int"),
        ("class E(Enum):\n  def __new__(c): pass\nclass A(BaseModel):\n  x: E", "line 2: .* no member"),
        ("class A(BaseModel):\n  x: Annotated[str, 'note']", "line 2: `'note'` in Annotated"),
        ("class A(BaseModel):\n  x: Annotated[str, Predicate(f)]", "`Predicate"),
        ("class A(BaseModel):\n  x: Annotated[str, Strict]", "`Strict` in Annotated"),
        ("class A(BaseModel):\n  x: Annotated[int, Gt(*y)]", "have no names"),
        ("class A(BaseModel):\n  x: Annotated[int, Len(1, 2, 3)]", "have no names"),
        ("class A(BaseModel):\n  x: Annotated[str, StringConstraints(to_upper=True)]", "to_upper"),
        ("class A(BaseModel):\n  x: Annotated[int]", "is no type"),
        ("class A(BaseModel):\n  x: list[Annotated[int, Field(alias='b')]]", "belongs to a field"),
        (
            "class A(BaseModel):\n  x: Annotated[int, MultipleOf(2), MultipleOf(3)]",
            "more than one multiple_of",
        ),
        ("class A(BaseModel):\n  x: list[int, str]", "line 2"),
        ("class A(BaseModel):\n  x: dict[int, str]", "line 2: `dict"),
        ("class A(BaseModel):\n  x: Union[int, Shape]", "line 2: the type Shape"),
        (
            "class A(BaseModel):\n  x: int = Field(validation_alias=AliasChoices('a'))",
            "must be a plain value",
        ),
        ("class A(BaseModel):\n  x: int = Field(alias=5)", "alias is `5`"),
        ("class A(BaseModel):\n  x: int = Field(serialization_alias='b')", "serialization_alias"),
        ("class A(BaseModel):\n  x: int = Field(**y)", "line 2"),
        ("class A(BaseModel):\n  x: int = Field(alias='y')\n  y: int", "two fields of A are called 'y'"),
        ("class A(BaseModel):\n  model_config = {'alias_generator': f}", "alias_generator"),
        ("class A(BaseModel):\n  model_config = {**other}", "line 2"),
        ("class A(BaseModel):\n  model_config = make()", "line 2: `make\\(\\)` is no configuration"),
        ("class A(BaseModel, str_max_length=3):\n  x: str", "line 1: str_max_length"),
        ("class A(BaseModel, extra='some'):\n  x: str", "known are forbid, allow, ignore"),
        ("class A(BaseModel, extra=['allow']):\n  x: str", "known are forbid, allow, ignore"),
        ("class A(BaseModel):\n  _x: int", "_x is no field"),
        (
            "class A(BaseModel):\n  x: int = Field(ge=0x" + "f" * 5000 + ")",
            "line 2: this must be a plain value",
        ),
        ("class A(BaseModel):\n  x: Literal['\\ud800']", "must be a plain value"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(code: str, words: str) -> None:
    with pytest.raises(CodeError, match=words):
        pydantic_to_schema(code)


def test_classes_that_double_one_another_are_refused_in_time() -> None:
    classes = [f"class A{n}(BaseModel):\n  a: A{n - 1}\n  b: A{n - 1}" for n in range(1, 60)]
    with pytest.raises(CodeError, match="too large"):
        pydantic_to_schema("\n".join(["class A0(BaseModel):\n  a: int", *classes]))
