"""StepMemory: estimates the host memory that is needed in addition to weights and KV cache.

rows            token pool, block tables, RoPE tables          as long as the engine runs
largest step    activations, scratch of the ops, logits, logprobs

On a GPU the memory of steps is measured instead, see `DeviceMemory`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.core.step import MAX_SCORED_TOKENS
from engine.model.config import ModelConfig
from kernels.ops import StepShape
from kernels.torch import experts
from kernels.torch.sampling import THREAD_CHUNK_ELEMENTS

# Words of 4 bytes per sampled row and token of the vocabulary: logits, a copy of the raw logits for logprobs, a copy of
# rows with penalties, and their token counts.
LOGIT_WORDS = 4
# Bytes per element of a chunk whose logprobs are computed: bits of the scores, sign masks, 64-bit sort keys,
# log-softmax.
LOGPROB_BYTES = 4 + 4 + 8 + 4


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Estimates for one model and its largest step."""

    config: ModelConfig
    dtype: torch.dtype
    num_tokens: int  # in the step
    num_rows: int  # in the batch, all of them sampled
    estimate_scratch: Callable[[StepShape], int]  # see `kernels.Ops`

    def estimate_step(self, context_len: int = 0, num_context_tokens: int = 0) -> int:
        """Return the estimated bytes of the largest step."""
        config = self.config
        attention = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
        # Hidden states; gate, up and their product in the MLP; inputs and outputs of attention.
        per_token = 4 * config.hidden_size + 3 * config.intermediate_size + attention
        shape = StepShape(
            *(self.num_rows, self.num_tokens, context_len, num_context_tokens),
            *(config.num_attention_heads, config.num_key_value_heads, config.head_dim),
            *(config.hidden_size, config.intermediate_size, self.dtype.itemsize),
        )
        activations = self.num_tokens * per_token * self.dtype.itemsize
        scratch = self.estimate_scratch(shape) + self._estimate_experts()
        return activations + scratch + self._estimate_logits()

    def estimate_rows(self, max_model_len: int, block_size: int) -> int:
        """Return the estimated bytes of all rows at this maximum length."""
        tokens = self.num_rows * (max_model_len + 1) * torch.int32.itemsize
        tables = self.num_rows * -(-max_model_len // block_size) * torch.int32.itemsize
        # Cosines and sines of half a head, twice while they are computed.
        rope = 2 * max_model_len * self.config.rope_size * torch.float32.itemsize
        return tokens + tables + rope

    def _estimate_experts(self) -> int:
        """Return the bytes of a mixture's rows, each token counted once per expert."""
        num_tokens, hidden_size, itemsize = self.num_tokens, self.config.hidden_size, self.dtype.itemsize
        moes = [spec.moe for spec in self.config.layer_specs if spec.moe is not None]
        return max(
            (
                experts.estimate_scratch(num_tokens, moe.top_k, hidden_size, moe.inner_size, itemsize)
                for moe in moes
            ),
            default=0,
        )

    def _estimate_logits(self) -> int:
        vocab_size = self.config.vocab_size
        num_logits = max(self.num_rows, MAX_SCORED_TOKENS) * vocab_size
        num_chunk = max(THREAD_CHUNK_ELEMENTS * torch.get_num_threads(), vocab_size)
        per_logit = self.dtype.itemsize + LOGIT_WORDS * torch.float32.itemsize
        return num_logits * per_logit + min(num_logits, num_chunk) * LOGPROB_BYTES
