"""Requirements of Triton beside a GPU, and the messages about missing ones."""

import importlib.util
import shutil
import sysconfig
from pathlib import Path

import pytest

from kernels.triton_support import find_kernel_errors, find_triton_gap


def test_a_compiler_and_headers_are_all_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    monkeypatch.delenv("CC", raising=False)
    assert find_triton_gap() == ""


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.delenv("CC", raising=False)
    assert find_triton_gap() == "triton needs a C compiler (gcc or clang), and none was found"


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert "Python's headers" in find_triton_gap()


def test_without_triton_there_are_no_errors_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [error.__name__ for error in find_kernel_errors()] == ["RuntimeError", "TritonError"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert find_triton_gap() == "triton is not installed"
    assert find_kernel_errors() == (RuntimeError,)
