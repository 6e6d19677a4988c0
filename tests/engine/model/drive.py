"""Drives a model over shuffled pages that contain NaN wherever nothing has been written.

Also builds tiny random checkpoints with transformers, whose logits the tests compare with.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from engine.device.kv_cache import allocate_kv_cache
from engine.kv_cache_spec import group_layers
from engine.lora.loader import Adapter
from engine.model import DecoderModel
from engine.model.adapters import StepAdapters, join_segments
from engine.model.attn_metadata import AttnMetadata
from engine.worker.state_slots import allocate_states, cut_runs
from tests.kernels.adapters import make_lora_matrix

# Names of transformers' classes, without ForCausalLM and Config (Gemma 3's is a TextConfig).
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
FAMILIES |= {"smollm3": "SmolLM3", "granite": "Granite", "phi3": "Phi3", "ministral3": "Ministral3"}
FAMILIES |= {"olmo2": "Olmo2", "olmo3": "Olmo3", "exaone4": "Exaone4", "gemma2": "Gemma2", "gemma3": "Gemma3"}
FAMILIES |= {"cohere2": "Cohere2", "seed_oss": "SeedOss", "starcoder2": "Starcoder2"}
FAMILIES |= {"granitemoehybrid": "GraniteMoeHybrid"}
FAMILIES |= {"qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral", "gpt_oss": "GptOss"}
FAMILIES |= {"glm4_moe": "Glm4Moe", "minimax_m2": "MiniMaxM2", "olmoe": "Olmoe", "granitemoe": "GraniteMoe"}
FAMILIES |= {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "glm4_moe_lite": "Glm4MoeLite"}
FAMILIES |= {"minicpm3": "MiniCPM3"}
# Those with state layers.
HYBRIDS = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "bamba": "Bamba"}
HYBRIDS |= {"granite4h": "GraniteMoeHybrid", "granite4h_moe": "GraniteMoeHybrid"}
HYBRIDS |= {"lfm2": "Lfm2", "lfm2_moe": "Lfm2Moe"}
_QWEN = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "eos_token_id": None}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3, "eos_token_id": None}
_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"], "head_dim": 12}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 12, "mamba_d_state": 16, "head_dim": 12}
_MAMBA |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_MAMBA |= {"shared_intermediate_size": 40}
_LOCAL_MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "num_dense_layers": 1}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
_DELTA |= {"linear_value_head_dim": 12, "num_hidden_layers": 4}
_LATENT: dict[str, Any] = {"kv_lora_rank": 22, "q_lora_rank": 36, "qk_rope_head_dim": 12, "head_dim": 12}
_LATENT |= {"qk_nope_head_dim": 14, "v_head_dim": 10, "num_key_value_heads": 4}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
# Further config of a family; experts have about the size of the other layers.
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_next": _QWEN | _DELTA | {"shared_expert_intermediate_size": 40},
    "qwen3_5": _DELTA,
    "lfm2": _CONV | {"block_multiple_of": 8},
    "lfm2_moe": _CONV | _LOCAL_MOE | {"num_experts": 8},
    "granite4h": _MAMBA | {"mamba_n_groups": 2, "num_local_experts": 0},
    "granite4h_moe": _MAMBA | _LOCAL | {"residual_multiplier": 0.3, "attention_multiplier": 0.2},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 12, "mamba_d_state": 16, "head_dim": 12},
    "qwen3_5_moe": _QWEN | _DELTA | {"shared_expert_intermediate_size": 40},
    "qwen2_moe": _QWEN | {"shared_expert_intermediate_size": 40},
    "qwen3_moe": _QWEN | {"norm_topk_prob": True},
    "mixtral": _LOCAL,
    "gpt_oss": _LOCAL | {"swiglu_limit": 0.5},
    "glm4_moe": _ROUTED,
    "deepseek_v2": _LATENT | _ROUTED | {"first_k_dense_replace": 1},
    "deepseek_v3": _LATENT | _ROUTED | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    "glm4_moe_lite": _LATENT | _ROUTED,
    "minicpm3": _LATENT,
    "minimax_m2": _LOCAL | {"rope_parameters": {"rope_theta": 5e3, "partial_rotary_factor": 0.5}},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 12},
    "granitemoe": _LOCAL | {"head_dim": 12},
    "granitemoehybrid": {
        "num_local_experts": 0, "shared_intermediate_size": 80, "layer_types": ["attention"] * 3,
        "position_embedding_type": "rope", "mamba_n_heads": 12, "attention_multiplier": 0.2,
    },
}
VOCAB_SIZE = 131


def make_transformers_model(family: str, **overrides: Any) -> PreTrainedModel:
    """Return a tiny float32 model of the family with lively random weights, biases and norms included."""
    prefix = (FAMILIES | HYBRIDS)[family]
    shape: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80}
    shape |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    shape |= {"max_position_embeddings": 1024, "pad_token_id": 0} | EXPERTS.get(family, {}) | overrides
    config_class = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    config = config_class(**shape, attn_implementation="eager")
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and parameter.mean() == 0:
                parameter.uniform_(-0.5, 0.5)  # 1 is added
            elif name.endswith(("norm.weight", "layernorm.weight")):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.15)
    return model.requires_grad_(False)


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Save the model as a checkpoint and return the folder."""
    model.save_pretrained(folder, **options)
    return folder


def make_adapter(model: DecoderModel, seed: int) -> Adapter:
    """Return an adapter of rank 8 that changes every matrix."""
    linears: list[Any] = list({part.linear: None for part in model.matrix_parts.values()})
    sizes = [(each, each.out_features, each.in_features) for each in linears]
    return Adapter({each: make_lora_matrix(rows, width, [(0, rows, 8)], seed) for each, rows, width in sizes})


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(1, VOCAB_SIZE) for i in range(length)]


class Driver:
    """A paged cache with its requests. Every block is handed out in shuffled order and starts as NaN.

    A request's table has one block of each group of layers for every `block_size` tokens, as `Request.block_ids`.
    """

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int = 160,
        block_size: int = 16,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.block_size = block_size
        dtype = kv_dtype or model.embed_tokens.dtype
        self.num_groups = len(group_layers(model.kv_specs()))
        num_blocks *= self.num_groups
        self.kv_caches = allocate_kv_cache(model.kv_specs(), num_blocks, block_size, dtype, torch.device("cpu"))
        for k_cache, v_cache in self.kv_caches:
            # In int8, scales of such bytes are NaN.
            k_cache.view(torch.uint8).fill_(0xFF)
            v_cache.view(torch.uint8).fill_(0xFF)
        self.state_caches = allocate_states(model.state_specs(), 16, torch.device("cpu"))
        for cache in (each for pair in self.state_caches for each in pair):
            cache.fill_(torch.nan)
        self.state_slots: dict[str, int] = {}
        self.free_blocks = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.block_tables: dict[str, list[int]] = {}
        self.num_computed: dict[str, int] = {}
        self.adapters: dict[str, Adapter] = {}  # by request

    def step(self, batch: dict[str, list[int]]) -> dict[str, Tensor]:
        """Append tokens to requests, in the order given, and return the logits of each, [n, V]."""
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in range(self.num_groups)]
        for request, token_ids in batch.items():
            table = self.block_tables.setdefault(request, [])
            start = self.num_computed.get(request, 0)
            for position in range(start, start + len(token_ids)):
                first = position // self.block_size * self.num_groups
                if first == len(table):
                    table += [self.free_blocks.pop() for _ in range(self.num_groups)]
                positions.append(position)
                for group, found in enumerate(slots):
                    found.append(table[first + group] * self.block_size + position % self.block_size)
            self.num_computed[request] = start + len(token_ids)
        query_lens = [len(token_ids) for token_ids in batch.values()]
        tokens = [token for token_ids in batch.values() for token in token_ids]
        metadata = self._make_metadata(list(batch), query_lens, slots)
        with torch.inference_mode():
            adapters = self._sort(list(batch), query_lens)
            head = None if adapters is None else adapters.select_head(np.arange(len(tokens)))
            ids, places = torch.tensor(tokens), torch.tensor(positions)
            hidden = self.model(ids, places, [*self.kv_caches, *self.state_caches], metadata, adapters)
            logits = self.model.compute_logits(hidden, head)
        return dict(zip(batch, logits.split(query_lens), strict=True))

    def _sort(self, requests: list[str], query_lens: list[int]) -> StepAdapters | None:
        places: dict[Adapter, list[int]] = {}
        start = 0
        for request, length in zip(requests, query_lens, strict=True):
            if request in self.adapters:
                places.setdefault(self.adapters[request], []).extend(range(start, start + length))
            start += length
        bound = [adapter.bind(self.model) for adapter in places]
        rows = [np.array(each) for each in places.values()]
        return join_segments(self.model.ops, bound, rows, torch.device("cpu"))

    def _make_metadata(self, requests: list[str], query_lens: list[int], slots: list[list[int]]) -> AttnMetadata:
        tables = [self.block_tables[request] for request in requests]
        width = max(map(len, tables))
        padded = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32)
        seq_lens = [self.num_computed[request] for request in requests]
        slots_of_states = [self.state_slots.setdefault(each, len(self.state_slots)) for each in requests]
        counts = np.array(query_lens)
        return AttnMetadata(
            slot_mapping=torch.tensor(slots),
            block_tables=padded.unflatten(1, (-1, self.num_groups)).permute(2, 0, 1).contiguous(),
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            query_lens_list=query_lens,
            seq_lens_list=seq_lens,
            states=cut_runs(np.array(slots_of_states), np.array(seq_lens) - counts, counts, [])
            if self.state_caches
            else None,
        )


def compute_expected(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Return transformers' logits of one sequence computed at once, [n, V]."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0]
