"""The choice of experts against transformers' own routers."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from engine.model.moe_spec import MoESpec
from kernels.torch.routing import choose_experts

HIDDEN, EXPERTS, TOP_K = 16, 12, 4
SIZES: Any = {"num_experts": EXPERTS, "inner_size": 8}
# family: keys of its config, path of the router in a layer, our spec
ROUTERS: dict[str, tuple[dict[str, Any], str, MoESpec]] = {
    "Qwen3Moe": ({"num_experts": EXPERTS}, "mlp.gate", MoESpec(TOP_K, **SIZES)),
    "Qwen3Moe normalized": (
        {"num_experts": EXPERTS, "norm_topk_prob": True}, "mlp.gate", MoESpec(TOP_K, is_normalized=True, **SIZES),
    ),
    "Mixtral": ({"num_local_experts": EXPERTS}, "mlp.gate", MoESpec(TOP_K, is_normalized=True, **SIZES)),
    "Olmoe": ({"num_experts": EXPERTS}, "mlp.gate", MoESpec(TOP_K, **SIZES)),
    "GraniteMoe": (
        {"num_local_experts": EXPERTS}, "block_sparse_moe.router", MoESpec(TOP_K, "topk_softmax", **SIZES),
    ),
    "GptOss": (
        {"num_local_experts": EXPERTS, "head_dim": 8}, "mlp.router",
        MoESpec(TOP_K, "topk_softmax", has_bias=True, **SIZES),
    ),
    "MiniMaxM2": (
        {"num_local_experts": EXPERTS, "head_dim": 8}, "mlp.gate",
        MoESpec(TOP_K, "sigmoid", is_normalized=True, has_correction_bias=True, **SIZES),
    ),
    "Glm4Moe": (
        {"n_routed_experts": EXPERTS, "routed_scaling_factor": 2.5, "first_k_dense_replace": 0},
        "mlp.gate",
        MoESpec(TOP_K, "sigmoid", True, 2.5, has_correction_bias=True, **SIZES),
    ),
    "Glm4Moe in groups": (
        {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}
        | {"first_k_dense_replace": 0},
        "mlp.gate",
        MoESpec(TOP_K, "sigmoid", False, 1.0, 4, 2, has_correction_bias=True, **SIZES),
    ),
}


def make_router(name: str) -> tuple[nn.Module, Tensor]:
    """Return transformers' router with random weights, and its correction bias."""
    keys, path, _ = ROUTERS[name]
    family = name.split()[0]
    shape = {"hidden_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    shape |= {"intermediate_size": 8, "vocab_size": 32, "num_experts_per_tok": TOP_K, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**(shape | keys))
    torch.manual_seed(0)
    layer = getattr(transformers, f"{family}Model")(config).layers[0]
    router = layer.get_submodule(path)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_()
    bias = torch.randn(EXPERTS)
    if hasattr(router, "e_score_correction_bias"):
        router.e_score_correction_bias.copy_(bias)
    return router, bias


@torch.no_grad()
@pytest.mark.parametrize("name", ROUTERS)
def test_experts_and_weights_equal_those_of_transformers(name: str) -> None:
    router, bias = make_router(name)
    spec = ROUTERS[name][2]
    hidden = torch.randn(200, HIDDEN)
    arguments = (hidden, bias) if name == "MiniMaxM2" else (hidden,)
    logits, expected_weights, expected_ids = router(*arguments)
    ids, weights = choose_experts(logits, spec, bias if spec.has_correction_bias else None)
    expected, actual = (
        torch.zeros(200, EXPERTS).scatter_(1, each_ids, each_weights)
        for each_ids, each_weights in ((expected_ids, expected_weights), (ids, weights))
    )
    assert torch.equal(expected != 0, actual != 0)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["Qwen3Moe normalized", "MiniMaxM2", "Glm4Moe in groups", "GptOss"])
def test_a_token_does_not_depend_on_the_tokens_beside_it(name: str) -> None:
    spec, generator = ROUTERS[name][2], torch.Generator().manual_seed(1)
    logits, bias = torch.randn(700, EXPERTS, generator=generator), torch.randn(EXPERTS, generator=generator)
    together = choose_experts(logits, spec, bias)
    for rows in (*(slice(i, i + 1) for i in range(30)), slice(40, 57), slice(0, 513)):
        alone = choose_experts(logits[rows], spec, bias)
        assert all(torch.equal(each, whole[rows]) for each, whole in zip(alone, together, strict=True))
