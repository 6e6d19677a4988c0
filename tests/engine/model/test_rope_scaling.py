"""Every RoPE scaling against transformers, from old and new keys of config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from engine.errors import ConfigError
from engine.model import DecoderModel, ModelConfig, RopeConfig, load_model
from engine.model.rope import RotaryEmbedding, compute_inv_freq
from tests.engine.model.drive import Driver, compute_expected, make_prompt, make_transformers_model, save

LENGTH = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, LENGTH: 64}
YARN = {"rope_type": "yarn", "factor": 4.0, LENGTH: 64}
LINEAR = {"rope_type": "linear", "factor": 2.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": LINEAR,
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-all-options": YARN
    | {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False},
    "yarn-attention-factor": YARN | {"attention_factor": 1.3},
}


def load_pair(
    folder: Path, scaling: dict[str, Any], max_positions: int = 256, family: str = "llama"
) -> tuple[PreTrainedModel, DecoderModel]:
    rope = {"rope_theta": 5000.0} | scaling
    expected = make_transformers_model(family, max_position_embeddings=max_positions, rope_parameters=rope)
    return expected, load_model(save(expected, folder))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaling_equals_transformers(tmp_path: Path, name: str, family: str) -> None:
    expected, model = load_pair(tmp_path, SCALINGS[name], family=family)
    prompt = make_prompt(250)
    driver = Driver(model)
    parts = [driver.step({"a": part})["a"] for part in (prompt[:100], prompt[100:249], prompt[249:])]
    torch.testing.assert_close(torch.cat(parts), compute_expected(expected, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [10, 64, 65, 200])
def test_dynamic_scaling_follows_the_context_length(tmp_path: Path, length: int) -> None:
    expected, model = load_pair(tmp_path, DYNAMIC, max_positions=64)
    prompt = make_prompt(length)
    logits = Driver(model).step({"other": make_prompt(30, 1), "a": prompt, "long": make_prompt(90, 2)})
    torch.testing.assert_close(logits["a"], compute_expected(expected, prompt), atol=1e-4, rtol=0)


def test_dynamic_scaling_in_decode_keeps_the_rotation_of_cached_keys(tmp_path: Path) -> None:
    expected, model = load_pair(tmp_path, DYNAMIC, max_positions=64)
    prompt = make_prompt(80)
    driver = Driver(model)
    with torch.inference_mode():
        output = expected(torch.tensor([prompt[:60]]), use_cache=True)
        driver.step({"a": prompt[:60]})
        for token in prompt[60:]:
            output = expected(torch.tensor([[token]]), past_key_values=output.past_key_values)
            logits = driver.step({"a": [token]})["a"]
            torch.testing.assert_close(logits, output.logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_old_keys_mean_the_same(tmp_path: Path, name: str) -> None:
    load_pair(tmp_path, SCALINGS[name])
    new = ModelConfig.from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    scaling = data.pop("rope_parameters")
    data["rope_theta"] = scaling.pop("rope_theta")
    data["rope_scaling"] = scaling | {"type": scaling.pop("rope_type")}
    path.write_text(json.dumps(data))
    assert ModelConfig.from_pretrained(tmp_path) == new


@pytest.mark.parametrize(
    ("max_positions", "scaling", "length"),
    [
        (64, {"rope_type": "default"}, 64), (64, LINEAR, 160), (64, DYNAMIC, 128),
        (64, {"rope_type": "yarn", "factor": 4.0}, 256), (64, YARN | {LENGTH: 48}, 192),
        (256, YARN | {LENGTH: 48}, 256), (256, LLAMA3 | {"factor": 8.0}, 256),
    ],
)
def test_a_scaling_makes_room_for_its_factor(max_positions: int, scaling: dict[str, Any], length: int) -> None:
    data = make_config(rope_parameters=scaling, max_position_embeddings=max_positions)
    assert ModelConfig.from_dict(data).max_model_len == length


def make_config(**overrides: Any) -> dict[str, Any]:
    return make_transformers_model("llama").config.to_dict() | overrides


NUMBER = "must be a number from"


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "longrope"),
        ({"rope_type": "linear"}, "factor"),
        *((LINEAR | {"factor": factor}, f"factor={factor}") for factor in (0, True)),
        *((LINEAR | {"factor": factor}, rf"{factor} {NUMBER} 0\.001 to 1e\+06") for factor in (1e-300, 1e7)),
        (LINEAR | {"beta_fast": 3}, "beta_fast"),
        (DYNAMIC | {LENGTH: 9}, "original_max"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        *((LLAMA3 | {"high_freq_factor": x}, "must be greater than low_freq_factor=1.0") for x in (0.5, 1.0)),
        (LLAMA3 | {"low_freq_factor": 1e-320}, f"low_freq_factor=1e-320 {NUMBER}"),
        *((base | {LENGTH: 0}, f"{LENGTH}=0 must be") for base in (LLAMA3, YARN)),
        (YARN | {LENGTH: 10**400}, f"{LENGTH}=1000"),
        (YARN | {"rope_theta": 1.0}, r"rope_theta=1\.0 must be greater than 1 with yarn"),
        *(
            (YARN | {name: 1e-320}, f"{name}=1e-320 {NUMBER}")
            for name in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
        ),
        ({"rope_type": "default", "rope_theta": 1e-300}, f"rope_theta=1e-300 {NUMBER} 1 to"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
    ],
)
def test_unsupported_scaling_is_refused_by_name(scaling: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_dict(make_config(rope_parameters=scaling))


@pytest.mark.parametrize(
    ("scaling", "shape", "named"),
    [
        ({"rope_type": "yarn"}, {"max_position_embeddings": 2, LENGTH: 4096}, "factor=0.00048828125 must be"),
        *(
            (scaling, {field: 10**400}, "max_position_embeddings=1000")
            for scaling in (LINEAR, {"rope_type": "yarn", "factor": 2.0})
            for field in ("max_position_embeddings", LENGTH)
        ),
        (DYNAMIC, {"head_dim": 2}, "head_dim=2 must be at least 4 with dynamic RoPE"),
    ],
)
def test_a_shape_that_a_scaling_cannot_work_with_is_refused_by_name(
    scaling: dict[str, Any], shape: dict[str, int], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_dict(make_config(rope_parameters=scaling, **shape))


RANGE, THETAS, LENGTHS = st.floats(0.001, 1e6), st.floats(1, 1e30), st.integers(1, 2**53)
OPTIONS = {"beta_fast": RANGE, "beta_slow": RANGE, "truncate": st.booleans()} | {
    name: st.none() | RANGE for name in ("attention_factor", "mscale", "mscale_all_dim")
}
ROPES = st.one_of(
    st.builds(RopeConfig, st.just("default"), theta=THETAS),
    st.builds(RopeConfig, st.just("linear"), THETAS, RANGE),
    st.builds(RopeConfig, st.just("dynamic"), THETAS, RANGE, st.integers(1, 2**20)),
    st.builds(RopeConfig, st.just("yarn"), st.floats(1, 1e30, exclude_min=True), RANGE, LENGTHS, **OPTIONS),
    st.builds(
        lambda *shared, low, span: RopeConfig("llama3", *shared, low, low + span),
        *(THETAS, RANGE, LENGTHS),
        low=RANGE,
        span=RANGE,
    ),
)


@given(ROPES, st.sampled_from([4, 6, 64, 128]))
def test_whatever_is_allowed_gives_finite_tables(rope: RopeConfig, head_dim: int) -> None:
    embedding = RotaryEmbedding(rope, head_dim, torch.device("cpu"))
    length = max(1, min(rope.original_max_position_embeddings * 3, 2**24))
    for seq_len in (1, length):
        rotation = embedding.compute(torch.tensor([0, 9]), [2], [min(seq_len, 64)])
        assert rotation.cos.isfinite().all() and rotation.sin.isfinite().all()
        assert compute_inv_freq(rope, head_dim, seq_len)[0].isfinite().all()


def test_tables_hold_each_angle_once_and_grow_with_the_contexts() -> None:
    embedding = RotaryEmbedding(RopeConfig(), 64, torch.device("cpu"))
    embedding.compute(torch.tensor([5]), [1], [6])
    small = embedding._cos.nbytes
    rotation = embedding.compute(torch.tensor([8191]), [1], [8192])
    assert embedding._cos.nbytes == embedding._sin.nbytes == 8192 * 64 // 2 * 4 == 4 * small
    assert torch.equal(rotation.cos[..., :32], rotation.cos[..., 32:])
    assert torch.equal(rotation.sin[..., :32], -rotation.sin[..., 32:])
