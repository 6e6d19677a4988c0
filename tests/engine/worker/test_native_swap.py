"""Native ops: there from the first step, or moved to while steps run; never needed, and off when told so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, ConfigError, EngineConfig, SamplingParams
from engine.model import ModelConfig, load_model
from engine.model.linear import Linear
from engine.worker import ops_choice
from engine.worker import worker as worker_module
from engine.worker.native_swap import NativeSwap
from engine.worker.worker import Worker
from kernels.cpu import NativeBuild, NativeLibrary
from kernels.ops import StepShape
from tests.engine.model.drive import Driver, make_prompt, make_transformers_model, save

MakeConfig = Callable[..., EngineConfig]


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    build = NativeBuild()
    build.start()
    library = build.wait()
    if library is None:
        pytest.skip(f"no native ops here: {build.status}")
    return library


class FakeBuild:
    """A build that is done when the test says so, with the library or without."""

    def __init__(self, library: NativeLibrary | None) -> None:
        self.library: NativeLibrary | None = None
        self.status = "being built"
        self._coming = library
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def start(self) -> None:
        """It has begun."""

    def wait(self, timeout_s: float | None = None) -> NativeLibrary | None:
        self._done.wait(timeout_s)
        return self.library

    def finish(self) -> None:
        self.library = self._coming
        self.status = "not available: no compiler" if self._coming is None else "ready (test)"
        self._done.set()


def make_swap(build: Any, dtype: torch.dtype = torch.float32) -> NativeSwap:
    return NativeSwap(dtype, 1, build)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_model_moves_over_between_two_steps(
    checkpoint: Path, library: NativeLibrary, quantization: Any
) -> None:
    build, model = FakeBuild(library), load_model(checkpoint, quantization=quantization)
    stays = Driver(load_model(checkpoint, quantization=quantization))
    moves, prompt = Driver(model), make_prompt(60)
    swap = make_swap(build)
    assert swap.start() is None
    swap.follow(model)
    first = moves.step({"a": prompt[:30]})["a"]
    assert torch.equal(first, stays.step({"a": prompt[:30]})["a"])
    build.finish()
    swap.join()
    assert (model.ops.name, swap.status) == ("native", "ready (test)")
    second = moves.step({"a": prompt[30:]})["a"]
    tolerance = 1e-4 if quantization is None else 0.05
    torch.testing.assert_close(second, stays.step({"a": prompt[30:]})["a"], atol=tolerance, rtol=0)


def test_a_build_that_ends_while_the_weights_load_is_not_missed(
    checkpoint: Path, library: NativeLibrary
) -> None:
    build, model = FakeBuild(library), load_model(checkpoint)
    swap = make_swap(build)
    assert swap.start() is None
    build.finish()
    swap.follow(model)
    swap.join()
    assert model.ops.name == "native"


def test_steps_go_on_while_the_weights_are_repacked(checkpoint: Path, library: NativeLibrary) -> None:
    """One matrix after the other: between any two of them a step gives the same logits."""
    model, prompt = load_model(checkpoint), make_prompt(40)
    expected = Driver(load_model(checkpoint)).step({"a": prompt})["a"]
    build = FakeBuild(library)
    build.finish()
    ops = make_swap(build).start()
    assert ops is not None
    num_seen = 0

    def look() -> bool:
        nonlocal num_seen
        num_seen += 1
        torch.testing.assert_close(Driver(model).step({"a": prompt})["a"], expected, atol=1e-4, rtol=0)
        return False

    with torch.inference_mode():
        assert model.repack(ops, look)
    assert num_seen == sum(isinstance(module, Linear) for module in model.modules())


def test_a_library_that_is_there_is_used_from_the_first_step(
    make_config: MakeConfig, library: NativeLibrary
) -> None:
    worker = Worker(make_config(device="cpu"), eos_token_ids=(1,))
    worker.load()
    assert worker.describe() == {"ops": "native", "native_ops": f"ready ({library.isa_name})"}


def test_without_a_compiler_plain_torch_goes_on(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "troupe.worker")
    build, model = FakeBuild(None), load_model(checkpoint)
    swap = make_swap(build)
    assert swap.start() is None
    swap.follow(model)
    build.finish()
    swap.join()
    assert model.ops.name == "torch-sdpa"
    assert "not available: no compiler; plain torch goes on" in caplog.text


def test_a_stopped_swap_leaves_the_model_as_it_is(checkpoint: Path, library: NativeLibrary) -> None:
    build, model = FakeBuild(library), load_model(checkpoint)
    swap = make_swap(build)
    swap.start()
    swap.follow(model)
    swap.stop()
    build.finish()
    swap.join()
    assert model.ops.name == "torch-sdpa"


def test_a_dtype_without_native_ops_stays_with_torch(checkpoint: Path, library: NativeLibrary) -> None:
    build, model = FakeBuild(library), load_model(checkpoint, dtype=torch.float16)
    build.finish()
    swap = make_swap(build, torch.float16)
    assert swap.start() is None
    swap.follow(model)
    swap.join()
    assert model.ops.name == "torch-sdpa"
    assert swap.status == "not available for float16"


@pytest.mark.parametrize("off", [{"enable_native_ops": False}, {"attention_backend": "sdpa"}])
def test_the_switch_is_off_when_it_is_off(make_config: MakeConfig, off: dict[str, Any]) -> None:
    worker = Worker(make_config(device="cpu", **off), eos_token_ids=(1,))
    worker.load()
    assert worker.describe() == {"ops": "torch-sdpa"}


def test_native_attention_that_cannot_be_had_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    build: Any = FakeBuild(None)
    build.finish()
    monkeypatch.setattr(ops_choice, "NativeSwap", lambda dtype, threads: NativeSwap(dtype, threads, build))
    worker = Worker(make_config(device="cpu", attention_backend="native"), eos_token_ids=(1,))
    with pytest.raises(ConfigError, match="native ops are not available: no compiler; use auto, or sdpa"):
        worker.load()


def use_build(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    monkeypatch.setattr(worker_module, "NativeSwap", lambda dtype, threads: NativeSwap(dtype, threads, build))


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_few_bits_start_with_the_ops_that_are_being_built(
    make_config: MakeConfig,
    library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
) -> None:
    """A change of ops on the way would change the text of a request that runs."""
    build = FakeBuild(library)
    use_build(monkeypatch, build)
    threading.Timer(0.2, build.finish).start()
    worker = Worker(make_config(device="cpu", **settings), eos_token_ids=(1,))
    worker.load()
    assert worker.describe() == {"ops": "native", "native_ops": "ready (test)"}
    assert worker.resolved.notices == ()
    worker.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "on torch-sdpa (native ops: not available: no compiler)"),
        ({"enable_native_ops": False}, "on torch-sdpa (native ops: off)"),
        ({"attention_backend": "flex"}, "on torch-flex (native ops: off)"),
    ],
)
@pytest.mark.parametrize(
    "few_bits",
    [{"quantization": "int8"}, {"dtype": "bfloat16"}, {"quantization": "int8", "dtype": "bfloat16"}],
)
def test_few_bits_without_them_say_what_they_give_up(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    few_bits: dict[str, Any],
    settings: dict[str, Any],
    message: str,
) -> None:
    build = FakeBuild(None)
    build.finish()
    use_build(monkeypatch, build)
    monkeypatch.setattr(Worker, "warm_up", Worker.reset)
    worker = Worker(make_config(device="cpu", **few_bits, **settings), eos_token_ids=(1,))
    worker.load()
    (notice,) = worker.resolved.notices
    (name, value), *_ = few_bits.items()
    assert notice.startswith(f"{name}={value!r} {message}: the same seed need not give the same text")


def test_float16_which_they_do_not_have_says_what_it_gives_up(make_config: MakeConfig) -> None:
    worker = Worker(make_config(device="cpu", dtype="float16"), eos_token_ids=(1,))
    worker.load()
    (notice,) = worker.resolved.notices
    assert "dtype='float16' on torch-sdpa (native ops: not available for float16): the same seed" in notice
    worker.close()


def test_in_float32_nothing_waits_and_nothing_is_said(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = FakeBuild(None)
    use_build(monkeypatch, build)
    worker = Worker(make_config(device="cpu"), eos_token_ids=(1,))
    worker.load()
    assert (worker.model.ops.name, worker.resolved.notices) == ("torch-sdpa", ())
    worker.close()


def test_tokens_are_the_same_with_native_ops_and_without(
    make_llm: Callable[..., LLM], library: NativeLibrary
) -> None:
    prompts = [make_prompt(length, length) for length in (1, 17, 64, 300, 5, 90)]
    params = [
        SamplingParams(temperature=number % 2, seed=number, max_tokens=40, ignore_eos=True)
        for number in range(len(prompts))
    ]
    tokens = []
    for backend in ("sdpa", "native"):
        with make_llm(attention_backend=backend, max_num_batched_tokens=100) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]


def test_the_copy_of_a_tied_head_is_counted_until_it_is_there(tmp_path: Path, library: NativeLibrary) -> None:
    save(make_transformers_model("qwen3", tie_word_embeddings=True, vocab_size=9000), tmp_path)
    build, model = FakeBuild(library), load_model(tmp_path)
    swap = make_swap(build)
    shape = StepShape(4, 32, 64, 64, 4, 2, 64, 256, 512, 4)
    assert swap.start() is None
    estimate = swap.estimate_move(model.config)
    assert swap.estimate_scratch(shape) > 0
    swap.follow(model)
    build.finish()
    swap.join()
    assert model.lm_head.packed.panels.nbytes <= estimate


def test_ops_that_are_there_or_never_come_take_nothing_more(checkpoint: Path, library: NativeLibrary) -> None:
    config = ModelConfig.from_pretrained(checkpoint)
    shape = StepShape(4, 32, 64, 64, 4, 2, 64, 256, 512, 4)
    for found in (library, None):
        build = FakeBuild(found)
        build.finish()
        swap = make_swap(build)
        swap.start()
        assert swap.estimate_move(config) == swap.estimate_scratch(shape) == 0
    assert make_swap(FakeBuild(library), torch.float16).estimate_move(config) == 0
