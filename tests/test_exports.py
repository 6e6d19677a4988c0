"""The public surface: every promised name is there and says what it is."""

import inspect
from pathlib import Path
from types import ModuleType

import pytest

import engine
import grammar
import kernels

ROOT = Path(__file__).resolve().parents[1]
SURFACE = [(module, name) for module in (engine, grammar, kernels) for name in module.__all__]


def list_public_methods(owner: type) -> list[tuple[str, object]]:
    """Methods and properties that the class itself defines."""
    found = [(name, value) for name, value in vars(owner).items() if not name.startswith("_")]
    return [(name, value) for name, value in found if inspect.isroutine(value) or isinstance(value, property)]


def is_obvious(value: object) -> bool:
    """A property of one line reads as fast as a docstring would."""
    getter = value.fget if isinstance(value, property) else None
    return getter is not None and len(inspect.getsource(getter).splitlines()) <= 3


@pytest.mark.parametrize(("module", "name"), SURFACE, ids=lambda each: getattr(each, "__name__", each))
def test_an_exported_name_exists_and_has_a_docstring(module: ModuleType, name: str) -> None:
    value = getattr(module, name)
    assert inspect.isclass(value) or callable(value)
    docstring = value.__doc__
    # A dataclass without one gets its signature.
    assert docstring and not docstring.startswith(f"{name}("), f"{module.__name__}.{name}"


@pytest.mark.parametrize("module", [engine, grammar, kernels], ids=lambda each: each.__name__)
def test_exports_are_told_once_and_their_methods_have_docstrings(module: ModuleType) -> None:
    assert len(set(module.__all__)) == len(module.__all__)
    classes = [value for name in module.__all__ if inspect.isclass(value := getattr(module, name))]
    assert not [
        f"{owner.__name__}.{name}"
        for owner in classes
        for name, value in list_public_methods(owner)
        if not inspect.getdoc(value) and not is_obvious(value)
    ]


def test_the_names_of_the_manual_are_exported() -> None:
    assert {"Engine", "LLM", "EngineConfig", "SamplingParams", "RequestOutput"} <= set(engine.__all__)
    assert {"GrammarCompiler", "GrammarSpec", "Vocabulary"} <= set(grammar.__all__)


def test_the_kernels_folder_wins_over_a_distribution_of_that_name() -> None:
    assert Path(kernels.__file__ or "").resolve().parent == ROOT / "kernels"


def test_a_name_that_is_not_exported_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'engine' has no attribute 'Scheduler'"):
        _ = engine.Scheduler  # type: ignore[attr-defined]
