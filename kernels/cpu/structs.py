"""The C interface as ctypes sees it, read from the declarations in `src/`: headers and exports.cpp.

Fields and arguments are pointers, or numbers of `_NUMBERS`. A pointer to a structure below has its type, so that ctypes
checks it and keeps its target alive.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, ClassVar

SOURCES = Path(__file__).resolve().parent / "src"
_NUMBERS: dict[str, Any] = {"int": c_int, "int32_t": c_int32, "int64_t": c_int64, "float": c_float, "void": None}
_headers = "\n".join(path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.h")))
_exports = (SOURCES / "exports.cpp").read_text(encoding="utf-8")


class ArgumentUnion(ctypes.Union):
    """`Argument`: of a call of a tape."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("integer", c_int64), ("number", c_float)]


class CallStruct(ctypes.Structure):
    """`Call`: of a tape; 9 is kMaxArguments of exports.cpp."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("function", c_int64), ("arguments", ArgumentUnion * 9)]


_structs: dict[str, Any] = {"Call": CallStruct}


def _find_type(declaration: str) -> Any:
    """Return the type of a declaration, such as `const Linear* gate`."""
    kind = declaration.removeprefix("const ").replace("*", " ").split()[0]
    if "*" not in declaration:
        return _NUMBERS[kind]
    return POINTER(_structs[kind]) if kind in _structs else c_void_p


def _read_struct(name: str) -> Any:
    """Return a structure of a header; those that it points to come before it."""
    found = re.search(rf"^struct {name} {{\n(.*?)^}};", _headers, re.DOTALL | re.MULTILINE)
    assert found is not None, f"no header declares {name}"
    fields: list[tuple[str, Any]] = []
    for line in re.sub(r"//.*", "", found[1]).split(";"):
        if line.strip() and "(" not in line and "}" not in line:
            kind, *others = line.strip().split(",")
            names = [each.split()[-1] for each in (kind, *others)]
            fields += [(each, _find_type(kind)) for each in names]
    _structs[name] = type(f"{name}Struct", (ctypes.Structure,), {"_fields_": fields})
    return _structs[name]


LinearStruct = _read_struct("Linear")
ExpertsStruct = _read_struct("Experts")
BatchStruct = _read_struct("Batch")
AttentionShapeStruct = _read_struct("AttentionShape")
RopeStoreStruct = _read_struct("RopeStore")
LoraPartStruct = _read_struct("LoraPart")
LoraStruct = _read_struct("Lora")
LoraSegmentStruct = _read_struct("LoraSegment")
SegmentsStruct = _read_struct("Segments")
ConvStruct = _read_struct("Conv")
ScanStruct = _read_struct("Scan")
DrawStruct = _read_struct("Draw")

_FUNCTION = re.compile(r"^EXPORT (\w+\*?) troupe_(\w+)\((.*?)\)", re.DOTALL | re.MULTILINE)
# function -> (result, arguments); those that compute run in a pool, their first argument
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    name: (_find_type(result), [_find_type(each.strip()) for each in arguments.split(",") if each.strip()])
    for result, name, arguments in _FUNCTION.findall(_exports)
}
# Functions that a tape may repeat, in the order of `kReplays`.
TAPE_FUNCTIONS: tuple[str, ...] = tuple(re.findall(r"replay<troupe_(\w+)>", _exports))
