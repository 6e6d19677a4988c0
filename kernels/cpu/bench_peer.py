"""The same steps by transformers, on a model of the same shape with random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kernels.cpu.bench_model import Shape

_NUM_NEW_TOKENS = 8


@functools.lru_cache(maxsize=1)
def make_peer(shape: Shape, dtype: torch.dtype) -> Any:
    """Build the model as `from_pretrained` would leave it, with sdpa attention."""
    config_class: Any = Qwen3Config if shape.qk_norm else LlamaConfig
    model_class: Any = Qwen3ForCausalLM if shape.qk_norm else LlamaForCausalLM
    config = config_class(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return model_class(config).to(dtype).eval().requires_grad_(False)


def make_peer_step(
    shape: Shape, dtype: torch.dtype, num_requests: int, query_len: int, context: int
) -> tuple[Callable[[], object], int]:
    """Return what to time, and how many steps it makes.

    A prefill is one forward pass. Decode is `generate` over a filled cache: its loop is part of the peer.
    """
    model = make_peer(shape, dtype)
    if query_len > 1:
        prompt = torch.randint(1, shape.vocabulary, (num_requests, query_len))
        return lambda: model(prompt, use_cache=True, logits_to_keep=1), 1
    prompt = torch.randint(1, shape.vocabulary, (num_requests, context + 1))
    with torch.inference_mode():
        filled = model(prompt[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    mask = torch.ones_like(prompt)

    def generate() -> object:
        cache = DynamicCache(config=model.config)
        for layer, kept in enumerate(filled.layers):
            cache.update(kept.keys, kept.values, layer)
        return model.generate(
            prompt,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=_NUM_NEW_TOKENS,
            min_new_tokens=_NUM_NEW_TOKENS,
            do_sample=False,
        )

    return generate, _NUM_NEW_TOKENS
