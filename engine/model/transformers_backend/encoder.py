"""EncoderModel: BERT and its relatives on transformers' code. Texts share a row without padding.

    step: whole texts ─▶ transformers' layers, each text over itself ─▶ hidden states ─▶ Pooler or classifier's head

A text is computed in one step, so nothing of it is kept: the KV cache only counts its tokens. A text has the same bits
in any batch if the products have, as those of the native ops do.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from engine.errors import ConfigError
from engine.kv_cache_spec import KVCacheSpec
from engine.model.adapters import StepAdapters
from engine.model.attn_metadata import AttnMetadata
from engine.model.implementation import EncoderConfig
from engine.model.rope_config import RopeConfig
from engine.model.transformers_backend.foreign import ForeignModel, WideLinear, replace_child
from engine.model.transformers_backend.paged_interface import INERT, UnsupportedModel
from kernels import Ops
from kernels.ops import KVCache

NAME = "troupe_encoder"
# Families whose positions begin after the id of the padding token.
_SHIFTED = ("roberta", "xlm-roberta", "camembert")
# Parts of checkpoints that embeddings do not need: heads of the training, and a pooler.
_HEADS = ("pooler.", "cls.", "lm_head.", "head.", "decoder.", "classifier.")
_INERT = INERT | {"deterministic"}  # of the attention that they replace
# Hidden states of a step are smaller: their pages are reused, not mapped and cleared anew in every layer. The most
# that glibc allows, since no grammars of an encoder's engine lie between them.
REUSED_BYTES = 32 * 2**20
_COUNTED = KVCacheSpec(1, 2, None)  # the least that the cache holds of a token


class StepTexts:
    """The texts of the step that is being computed; set before each forward pass."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.groups: list[Tensor] = []  # [n, L]: the tokens of n texts of length L

    def set(self, lengths: Sequence[int], device: torch.device) -> None:
        starts: dict[int, list[int]] = {}
        self.num_tokens = 0
        for length in lengths:
            starts.setdefault(length, []).append(self.num_tokens)
            self.num_tokens += length
        self.groups = [
            torch.tensor(firsts, device=device)[:, None] + torch.arange(length, device=device)
            for length, firsts in starts.items()
        ]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface: [1, heads, T, size], each text over itself in both directions.

    Args:
        sliding_window: a token attends to those less than this many places away.
    """
    refused = [name for name, each in others.items() if each is not None and name not in _INERT]
    if refused or attention_mask is not None or dropout or getattr(module, "is_causal", False):
        names = ", ".join([*refused, "masks, dropout, or in one direction"])
        raise UnsupportedModel(f"{type(module).__name__} attends with {names}, which encoders here do not")
    texts: StepTexts = module.troupe_texts  # type: ignore[assignment]
    rows = [each[0].transpose(0, 1) for each in (query, key, value)]
    has_groups = query.shape[1] != key.shape[1]
    out = query.new_empty(texts.num_tokens, query.shape[1], value.shape[3])
    for index in texts.groups:
        length, mask = index.shape[1], None
        if sliding_window is not None and length > sliding_window:
            places = torch.arange(length, device=index.device)
            mask = (places[:, None] - places).abs() < sliding_window
        # Texts of one length need no copy.
        is_whole = index.numel() == texts.num_tokens
        q, k, v = (
            (each.view(*index.shape, *each.shape[1:]) if is_whole else each[index]).transpose(1, 2) for each in rows
        )
        part = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=has_groups)
        if is_whole:
            return part.transpose(1, 2).flatten(0, 1)[None], None
        out[index] = part.transpose(1, 2)
    return out[None], None


class EncodedText(nn.Module):
    """Stands in for the layers under a classifier's head: it returns the hidden states that it was given."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPooling:
        assert self.hidden is not None, "it is set before the head runs"
        pooled = None if self.pooler is None else self.pooler(self.hidden)
        return BaseModelOutputWithPooling(last_hidden_state=self.hidden, pooler_output=pooled)


class EncoderModel(ForeignModel):
    """An encoder of transformers."""

    def __init__(self, source: PreTrainedModel, config: EncoderConfig, ops: Ops | None = None) -> None:
        super().__init__(source, config, ops)
        self.aux_layers: tuple[int, ...] = ()
        prefix = source.base_model_prefix
        base = getattr(source, prefix) if config.num_labels else source
        pooler = getattr(base, "pooler", None)
        self._texts = StepTexts()
        for name, module in list(base.named_modules()):
            module.troupe_texts = self._texts  # type: ignore[assignment]
            if type(module) is nn.Linear and not name.startswith("pooler."):
                base.set_submodule(name, WideLinear(module, None))
        self._text = EncodedText(pooler)
        # Python references, not submodules: the source has these modules already.
        self._base = (base,)
        self._head = [replace_child(source, prefix, self._text)] if config.num_labels else []

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], attn_metadata: AttnMetadata,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Return the final hidden states [T, D] of whole texts."""
        self._texts.set(attn_metadata.query_lens_list, input_ids.device)
        options: dict[str, Tensor] = {}
        if self.config.has_token_types:
            types = attn_metadata.token_types
            options["token_type_ids"] = (torch.zeros_like(input_ids) if types is None else types)[None]
        self.before_layers()
        places = (positions + self.config.first_position)[None]
        hidden: Tensor = self._base[0](
            input_ids=input_ids[None], position_ids=places, **options
        ).last_hidden_state
        return hidden[0]

    def compute_logits(self, hidden: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Return zeros: the token that ends a request is dropped."""
        return torch.zeros(len(hidden), self.config.vocab_size, device=hidden.device)

    def classify(self, hidden: Tensor) -> Tensor:
        """Return the scores of a text by the classifier's head: [T, D] -> [labels] float32."""
        self._text.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)  # read for its shape alone
        try:
            logits: Tensor = self._head[0](input_ids=ids).logits
        finally:
            self._text.hidden = None
        return logits[0].float()

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        return (_COUNTED,)

    def adapt(self, ops: Ops) -> Ops:
        """Return the ops with float32 products from several of bfloat16, where that is faster."""
        if self.dtype != torch.float32 or ops.pack_split is None:
            return ops
        return replace(ops, pack_linear=ops.pack_split)


def make_config(source: PreTrainedConfig, where: str) -> EncoderConfig:
    """Return the config of an encoder; refuse what its code here would compute otherwise.

    Raises:
        ConfigError: names the key.
    """
    wanted = {"position_embedding_type": "absolute", "is_decoder": False, "quantization_config": None}
    for key, value in wanted.items():
        if (found := getattr(source, key, value)) not in (value, None):
            raise ConfigError(f"{where}: {key}={found!r} is not supported for an encoder; it must be {value!r}")
    name = (source.architectures or [type(source).__name__])[0]
    num_labels = source.num_labels if name.endswith("ForSequenceClassification") else 0
    first = source.pad_token_id + 1 if source.model_type in _SHIFTED else 0
    with torch.device("meta"):
        model = build(source, num_labels)
    heads = source.num_attention_heads
    dtype = str(source.dtype or "float32").removeprefix("torch.")
    config = EncoderConfig(
        architecture=name, vocab_size=source.vocab_size, hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size, num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=heads, num_key_value_heads=getattr(source, "num_key_value_heads", heads),
        head_dim=getattr(source, "head_dim", source.hidden_size // heads),
        max_position_embeddings=source.max_position_embeddings - first, rope=RopeConfig(),
        dtype=dtype if dtype in ("bfloat16", "float16") else "float32",
        num_parameters=sum(each.numel() for each in model.parameters()), source=source, num_labels=num_labels,
        first_position=first, has_token_types=getattr(source, "type_vocab_size", 1) > 1,
    )
    return replace(config, notices=(config.refusal,))


def build(source: PreTrainedConfig, num_labels: int) -> PreTrainedModel:
    """Build the model of a config on the current device, with random weights, float32."""
    config, options = prepare_read(source)
    auto = find_auto_class(num_labels)
    return auto.from_config(config, dtype=torch.float32, trust_remote_code=False, **options)  # type: ignore[no-any-return]


def find_auto_class(num_labels: int) -> Any:
    """Return transformers' factory."""
    return transformers.AutoModelForSequenceClassification if num_labels else transformers.AutoModel


def prepare_read(source: PreTrainedConfig) -> tuple[PreTrainedConfig, dict[str, str]]:
    """Return a copy of the config, into which transformers writes, and options that select our attention."""
    transformers.AttentionInterface.register(NAME, _attend)
    config = deepcopy(source)
    config.use_cache = False  # no keys and values
    return config, {"attn_implementation": NAME}


def is_spare(name: str, config: EncoderConfig) -> bool:
    """Whether embeddings do not need a tensor."""
    return not config.num_labels and name.startswith(_HEADS)
