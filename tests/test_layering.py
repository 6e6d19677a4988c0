"""Architecture rules: allowed imports between packages, and forbidden constructs.

kernels, grammar ◀── engine ◀── app        checked on the syntax trees; nothing is imported
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("app", "engine", "grammar", "kernels")
ALLOWED = {
    "kernels": {"kernels"},
    "grammar": {"grammar"},
    "engine": {"engine", "kernels", "grammar"},
    "app": {"app", "engine", "grammar"},
}
ASYNC_FILES = {
    "engine/engine.py", "engine/engine_core.py", "engine/llm.py", "engine/beam_search.py", "engine/embedder.py",
    "engine/leased_engine.py", "engine/stats_log.py",
    "engine/input/input_processor.py", "engine/input/images/intake.py", "engine/input/images/source.py",
}  # fmt: skip
ASYNC_FOLDERS = ("engine/actors/", "engine/cluster/", "engine/front/", "engine/wire/", "app/")
# The folders of engine/ from the top floor down. A folder imports only those below it.
FLOORS = (
    "front", "cluster", "actors", "worker, spec/device", "transfer", "parallel", "device",
    "core, spec", "lora", "input", "wire", "model",
)  # fmt: skip
# "file: name" of imports that cannot stand at the top, each with its reason beside it.
IMPORTS_INSIDE_FUNCTIONS: frozenset[str] = frozenset()


class Import(NamedTuple):
    """`from module import name`, or `import module` with no name."""

    module: str
    name: str | None
    line: int

    @property
    def top(self) -> str:
        return self.module.split(".")[0]


def list_files(*packages: str) -> list[Path]:
    """The sources of these packages, or of all."""
    return [path for package in packages or PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def name_file(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def list_nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(parse(path)))


def name_module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def list_imports(path: Path) -> tuple[Import, ...]:
    """Every import of a file."""
    return tuple(find_imports(path, list_nodes(path)))


def find_imports(path: Path, nodes: Iterable[ast.AST]) -> Iterator[Import]:
    """The imports among these nodes of a file, relative ones spelled out."""
    package = name_module(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (Import(module, alias.name, node.lineno) for alias in node.names)


def find_wrong(paths: Iterable[Path], is_wrong: Callable[[Import], bool]) -> list[str]:
    return [
        f"{name_file(path)}:{each.line} imports {each.module} {each.name or ''}"
        for path in paths
        for each in list_imports(path)
        if is_wrong(each)
    ]


@cache
def make_graph() -> dict[str, set[str]]:
    """Module -> first-party modules it names. Parents' `__init__` files, which run too, are left out."""
    paths = {name_module(path): path for path in list_files()}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        children = ((f"{each.module}.{each.name}", each.module) for each in list_imports(path))
        found = {child if child in paths else parent for child, parent in children}
        graph[module] = found & paths.keys() - {module}
    return graph


def find_reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, open_ends = set(), [start]
    while open_ends:
        module = open_ends.pop()
        if module not in seen:
            seen.add(module)
            open_ends += graph[module]
    return seen


def find_room(module: str) -> str:
    """Return the folders of engine/ that share this module's floor, or the module if it is in none."""
    path = module.removeprefix("engine.").replace(".", "/") + "/"
    rooms = [(len(folder), floor) for floor in FLOORS for folder in floor.split(", ") if path.startswith(f"{folder}/")]
    return max(rooms)[1] if rooms else module


def list_exported(package: str) -> set[str]:
    for node in parse(ROOT / package / "__init__.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{package} has no __all__")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_those_below_it(package: str) -> None:
    others = {*PACKAGES, "tests"} - ALLOWED[package]
    assert not find_wrong(list_files(package), lambda each: each.top in others)


def test_the_app_takes_only_public_names() -> None:
    exported = {package: list_exported(package) for package in ("engine", "grammar")}
    assert not find_wrong(
        list_files("app"),
        lambda each: (
            each.top in exported and (each.module != each.top or each.name not in exported[each.top])
        ),
    )


@pytest.mark.parametrize("forbidden", ["asyncio", "torch"])
def test_core_is_free_of_asyncio_and_torch(forbidden: str) -> None:
    """This includes the engine modules that it imports."""
    graph = make_graph()
    cores = (name for name in graph if name.startswith("engine.core."))
    reached = {name for core in cores for name in find_reachable(graph, core)}
    paths = [path for path in list_files("engine") if name_module(path) in reached]
    assert not find_wrong(paths, lambda each: each.top == forbidden)


def test_a_folder_of_the_engine_imports_only_floors_below_it() -> None:
    """The files beside the folders have floors as well: no import leads from a room back to itself."""
    graph = {module: names for module, names in make_graph().items() if module.startswith("engine.")}
    rooms: dict[str, set[str]] = {find_room(module): set() for module in graph}
    wrong = []
    for module, names in graph.items():
        for name in names & graph.keys():
            above, below = find_room(module), find_room(name)
            if above != below:
                rooms[above].add(below)
            if {above, below} <= {*FLOORS} and FLOORS.index(above) > FLOORS.index(below):
                wrong.append(f"{module} imports {name}")
    wrong += [room for room in rooms if any(room in find_reachable(rooms, below) for below in rooms[room])]
    assert not wrong
    assert all((ROOT / "engine" / name).is_dir() for floor in FLOORS for name in floor.split(", "))
    assert {path.parent.name for path in (ROOT / "engine").glob("*/__init__.py")} <= {*", ".join(FLOORS).split(", ")}


def test_asyncio_stays_in_the_shells() -> None:
    shells = (*ASYNC_FILES, *ASYNC_FOLDERS)
    assert all((ROOT / shell).exists() for shell in shells), "the list has outlived a renaming"
    paths = [path for path in list_files() if not name_file(path).startswith(shells)]
    assert not find_wrong(paths, lambda each: each.top == "asyncio")


def test_modules_import_each_other_without_cycles() -> None:
    TopologicalSorter(make_graph()).prepare()  # raises an error that names a cycle


def test_no_import_hides_in_a_function() -> None:
    hidden = {
        f"{name_file(path)}: {each.module}"
        for path in list_files()
        for node in list_nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for each in find_imports(path, ast.walk(node))
    }
    assert hidden == IMPORTS_INSIDE_FUNCTIONS


def test_nothing_is_pickled_and_no_text_becomes_code() -> None:
    picklers = ("pickle", "cloudpickle", "dill", "marshal", "shelve")
    wrong = find_wrong(list_files(), lambda each: each.top in picklers)
    for path in list_files():
        for call in (node for node in list_nodes(path) if isinstance(node, ast.Call)):
            options = {keyword.arg: keyword.value for keyword in call.keywords}
            options = {name: ast.unparse(options[name]) for name in ("weights_only", "allow_pickle") if name in options}
            last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            name = ast.unparse(call.func) if last in ("eval", "exec", "load") else last
            is_open_load = name == "torch.load" and options.get("weights_only") != "True"
            is_pickled_array = options.get("allow_pickle") == "True"
            if name in ("eval", "exec", "builtins.eval", "builtins.exec") or is_open_load or is_pickled_array:
                wrong.append(f"{name_file(path)}:{call.lineno} {name}")
    assert not wrong


def test_no_error_is_swallowed_unseen() -> None:
    """No bare `except:`, and no broad one that does nothing."""
    wrong = []
    for path in list_files():
        for node in (node for node in list_nodes(path) if isinstance(node, ast.ExceptHandler)):
            is_broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            does_nothing = all(isinstance(each, ast.Pass | ast.Continue) for each in node.body)
            if node.type is None or (is_broad and does_nothing):
                wrong.append(f"{name_file(path)}:{node.lineno}")
    assert not wrong


def test_every_module_has_a_docstring() -> None:
    trees = {name_file(path): parse(path) for path in list_files()}
    assert not [file for file, tree in trees.items() if tree.body and not ast.get_docstring(tree)]
