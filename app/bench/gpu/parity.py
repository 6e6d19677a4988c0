"""The engine against transformers on the same device: greedy answers of a small random model, token for token."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine import LLM, SamplingParams

MAX_TOKENS = 24


def compare_with_transformers(folder: Path, *, is_smoke: bool) -> dict[str, Any]:
    """Answer prompts of different lengths with both, in float32; the engine in one batch, transformers one by one.

    Args:
        folder: where the model is written for the engine to load.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=10,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=False,
        initializer_range=0.2, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    device = "cpu" if is_smoke else "cuda"
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder / "parity")
    model.to(device)
    source = Random(0)
    lengths = (1, 15, 16, 17, 40) if is_smoke else (1, 15, 16, 17, 40, 100, 257, 600, 1100)
    prompts = [[source.randint(1, 999) for _ in range(length)] for length in lengths]
    settings: dict[str, Any] = {"device": device, "attention_backend": "sdpa" if is_smoke else "triton"}
    with LLM(
        str(folder / "parity"), skip_tokenizer_init=True, dtype="float32", num_blocks=400, max_model_len=1200,
        max_num_batched_tokens=512, enable_native_ops=False, **settings,
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        outputs = llm.generate(list(prompts), params, use_tqdm=False)
    different = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt], device=device)
        answer = model.generate(
            ids, max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
        )
        if list(output.outputs[0].token_ids) != answer[0, len(prompt) :].tolist():
            different.append(len(prompt))
    return {
        "num_prompts": len(prompts),
        "num_equal": len(prompts) - len(different),
        "different_prompt_lengths": different,
    }
