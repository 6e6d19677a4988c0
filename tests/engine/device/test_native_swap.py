"""Native ops: used from the first step, or swapped in while steps run; optional, and off if disabled."""

import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import ConfigError, EngineConfig
from engine.device import ops_choice
from engine.device.native_swap import NativeSwap
from engine.model import DecoderModel, ModelConfig, load_model
from engine.model.linear import Linear
from engine.model.moe import Experts
from engine.model.sharding import Sharding
from engine.worker.worker import Worker
from kernels.cpu import NativeLibrary
from kernels.ops import KVCache, StepShape
from tests.engine.model.drive import Driver, make_prompt, make_transformers_model, save
from tests.engine.worker.plans import make_new_row, make_plan
from tests.kernels.cpu.conftest import require_library

MakeConfig = Callable[..., EngineConfig]
SHAPE = StepShape(4, 32, 64, 64, 4, 2, 64, 256, 512, 4)


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    return require_library()


class FakeBuild:
    """A build that the test completes, with the library or without."""

    def __init__(self, library: NativeLibrary | None, is_done: bool = False) -> None:
        self.library: NativeLibrary | None = None
        self.status = "being built"
        self._coming = library
        self._done = threading.Event()
        if is_done:
            self.finish()

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


def move_over(swap: NativeSwap, model: DecoderModel, kv_caches: Sequence[KVCache] = ()) -> int:
    """Make every move there is; returns how many."""
    count = 0
    while swap.has_move:
        swap.move_next(model, kv_caches)
        count += 1
    return count


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_model_moves_over_between_two_steps(checkpoint: Path, library: NativeLibrary, quantization: Any) -> None:
    build, model = FakeBuild(library), load_model(checkpoint, quantization=quantization)
    stays = Driver(load_model(checkpoint, quantization=quantization))
    moves, prompt = Driver(model), make_prompt(60)
    swap = make_swap(build)
    assert swap.start() is None
    first = moves.step({"a": prompt[:30]})["a"]
    assert torch.equal(first, stays.step({"a": prompt[:30]})["a"])
    assert not swap.has_move
    build.finish()
    move_over(swap, model, moves.kv_caches)
    assert (model.ops.name, swap.status) == ("native", "ready (test)")
    second = moves.step({"a": prompt[30:]})["a"]
    tolerance = 1e-4 if quantization is None else 0.05
    torch.testing.assert_close(second, stays.step({"a": prompt[30:]})["a"], atol=tolerance, rtol=0)


def test_a_build_that_fails_leaves_the_model_as_it_is(checkpoint: Path) -> None:
    build, model = FakeBuild(None), load_model(checkpoint)
    swap = make_swap(build)
    assert swap.start() is None
    build.finish()
    assert move_over(swap, model) == 1
    assert model.ops.name == "torch-sdpa"


WHOLE, SLICED = Sharding(), Sharding(is_sliced=True)


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        ("qwen3", WHOLE), ("qwen3_moe", SLICED), ("gpt_oss", WHOLE), ("olmoe", SLICED), ("deepseek_v3", WHOLE),
        *(
            pytest.param(kind, SLICED if kind in ("qwen3", "gpt_oss", "deepseek_v3") else WHOLE, marks=pytest.mark.soak)
            for kind in ("qwen3", "qwen3_moe", "gpt_oss", "olmoe", "deepseek_v3")
        ),
    ],
)
def test_steps_between_two_moves_give_the_same_logits(
    kind: str, sharding: Sharding, tmp_path: Path, library: NativeLibrary
) -> None:
    build, prompt = FakeBuild(library), make_prompt(40)
    model = load_model(save(make_transformers_model(kind), tmp_path), sharding=sharding)
    expected = Driver(model).step({"a": prompt})["a"]
    swap = make_swap(build)
    swap.start()
    build.finish()
    num_moves = 0
    while swap.has_move:
        swap.move_next(model, ())
        num_moves += 1
        torch.testing.assert_close(Driver(model).step({"a": prompt})["a"], expected, atol=1e-4, rtol=0)
    assert num_moves == 1 + sum(isinstance(module, Linear | Experts) for module in model.modules())
    assert model.ops.name == "native"


@pytest.mark.parametrize("is_sliced", [False, True])
def test_a_packed_layer_frees_the_matrix_that_it_was_loaded_into(checkpoint: Path, is_sliced: bool) -> None:
    config = ModelConfig.from_pretrained(checkpoint)
    model = DecoderModel(config, torch.float32, torch.device("cpu"), sharding=Sharding(is_sliced=is_sliced))
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    matrices = [weakref.ref(each.weight) for each in linears if each.weight is not None]
    model.pack()
    assert matrices and not any(matrix() for matrix in matrices)


def test_a_lack_of_memory_for_a_move_ends_the_moves_and_not_the_steps(
    checkpoint: Path, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, model, prompt = FakeBuild(library), load_model(checkpoint), make_prompt(40)
    expected = Driver(load_model(checkpoint)).step({"a": prompt})["a"]
    swap = make_swap(build)
    swap.start()
    build.finish()
    swap.move_next(model, ())

    def refuse(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Linear, "repack", refuse)
    assert move_over(swap, model) == 1
    assert model.ops.name == "torch-sdpa"
    torch.testing.assert_close(Driver(model).step({"a": prompt})["a"], expected, atol=1e-4, rtol=0)


def load_worker(make_config: MakeConfig, **settings: Any) -> Worker:
    worker = Worker(make_config(device="cpu", **settings), eos_token_ids=(1,))
    worker.load()
    return worker


def test_a_library_that_is_there_is_used_from_the_first_step_unless_it_is_off(
    make_config: MakeConfig, library: NativeLibrary
) -> None:
    ready = {"ops": "native", "native_ops": f"ready ({library.isa_name})"}
    assert load_worker(make_config).describe() == ready
    assert load_worker(make_config, attention_backend="sdpa").describe() == {"ops": "torch-sdpa"}


def use_build(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    monkeypatch.setattr(ops_choice, "NativeSwap", lambda dtype, threads: NativeSwap(dtype, threads, build))


def test_native_attention_that_cannot_be_had_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_build(monkeypatch, FakeBuild(None, is_done=True))
    with pytest.raises(ConfigError, match="native ops are not available: no compiler; use auto, or sdpa"):
        load_worker(make_config, attention_backend="native")


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}])
def test_few_bits_start_with_the_ops_that_are_being_built(
    make_config: MakeConfig, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """A change of ops between steps would change the text of a running request."""
    build = FakeBuild(library)
    use_build(monkeypatch, build)
    threading.Timer(0.2, build.finish).start()
    worker = load_worker(make_config, **settings)
    assert worker.describe() == {"ops": "native", "native_ops": "ready (test)"}
    assert worker.resolved.notices == ()
    worker.close()


INT8, INT4, BRAIN = {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("settings", "notice"),
    [
        (INT8, "quantization='int8' on torch-sdpa (native ops: not available: no compiler)"),
        (INT4, "quantization='int4' on torch-sdpa (native ops: not available: no compiler)"),
        (BRAIN, "dtype='bfloat16' on torch-sdpa (native ops: not available: no compiler)"),
        (INT8 | BRAIN | {"enable_native_ops": False}, "quantization='int8' on torch-sdpa (native ops: off)"),
        (BRAIN | {"attention_backend": "sdpa"}, "dtype='bfloat16' on torch-sdpa (native ops: off)"),
        ({"dtype": "float16"}, "dtype='float16' on torch-sdpa (native ops: not available for float16)"),
    ],
)
def test_few_bits_without_them_say_what_they_give_up(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], notice: str
) -> None:
    use_build(monkeypatch, FakeBuild(None, is_done=True))
    monkeypatch.setattr(Worker, "warm_up", Worker.reset)
    (found,) = load_worker(make_config, **settings).resolved.notices
    assert found.startswith(f"{notice}: the same seed need not give the same text")


def test_a_worker_moves_over_while_steps_come_without_a_pause(
    make_config: MakeConfig, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = FakeBuild(library)
    use_build(monkeypatch, build)
    worker = load_worker(make_config)
    worker.execute(make_plan([(0, 0, 4)], new=[make_new_row(0, [1, 2, 3, 4], range(1, 6))]))
    build.finish()
    for position in range(4, 68):
        worker.execute(make_plan([(0, position, 1)], position))
    assert (worker.do_chore(), worker.describe()["ops"]) == (False, "native")


def test_the_copy_of_a_tied_head_is_counted_until_it_is_there(tmp_path: Path, library: NativeLibrary) -> None:
    save(make_transformers_model("qwen3", tie_word_embeddings=True, vocab_size=9000), tmp_path)
    build, model = FakeBuild(library), load_model(tmp_path)
    swap = make_swap(build)
    assert swap.start() is None
    estimate = swap.estimate_move(model.config)
    assert swap.estimate_scratch(SHAPE) > 0
    build.finish()
    move_over(swap, model)
    assert model.lm_head.packed.panels.nbytes <= estimate


def test_ops_that_are_there_or_never_come_take_nothing_more(checkpoint: Path, library: NativeLibrary) -> None:
    config = ModelConfig.from_pretrained(checkpoint)
    for found in (library, None):
        swap = make_swap(FakeBuild(found, is_done=True))
        swap.start()
        assert swap.estimate_move(config) == swap.estimate_scratch(SHAPE) == 0
    assert make_swap(FakeBuild(library), torch.float16).estimate_move(config) == 0
