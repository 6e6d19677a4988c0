"""Where the kernels run: on a CUDA device, or on the CPU in a process whose Triton interprets.

Triton decides when it is imported whether it interprets, so a process does one or the other. `test_interpreter`
starts the process that interprets and runs these same tests there.
"""

import inspect
import os
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def multiply_in_order(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """A matrix product that adds along K from first to last, as a GPU does for every row of a tile.

    BLAS picks the order by the processor and by the row's place in the tile, so its bits would be no test.
    """
    a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    return np.add.reduce(np.multiply(a.T[:, :, None], b[:, None, :], order="C"), axis=0)


def prepare_language_once(interpreter: Any, language: Any) -> None:
    """Let each kernel prepare a module of Triton's language for interpretation once.

    The interpreter does so in every call of every function, which takes nearly half of its time.
    """
    prepare, launch, prepared = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    @cache
    def find_modules(function: Any) -> frozenset[str]:
        found = [each for each in function.__globals__.values() if inspect.ismodule(each)]
        return frozenset(each.__name__ for each in found if each in (language, language.core))

    def prepare_once(function: Any) -> Any:
        modules = find_modules(function)
        if modules <= prepared:
            return None
        prepared.update(modules)
        return prepare(function)

    def launch_first(*arguments: Any, **options: Any) -> None:
        prepared.clear()
        launch(*arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = prepare_once, launch_first


if IS_INTERPRETED:
    import triton.language
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    prepare_language_once(interpreter, triton.language)

    # A GPU computes with infinities in silence; numpy, which interprets, warns.
    np.seterr(all="ignore")
    assert "np.matmul(" in inspect.getsource(InterpreterBuilder.create_dot), "the next line replaces nothing"
    np.matmul = multiply_in_order  # type: ignore[assignment]


@pytest.fixture
def device() -> torch.device:
    if IS_INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; on the CPU test_interpreter.py runs this test in a process of its own")
    return torch.device("cuda")
