"""Tiny random encoders of transformers' own classes, with a lower-casing WordPiece tokenizer that writes pairs."""

import json
import string
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedModel

from engine.model.transformers_backend.leak_probe import randomise

SPECIAL = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]
VOCAB = [*SPECIAL, *string.ascii_lowercase, *(f"##{each}" for each in string.ascii_lowercase)]
_SIZES: dict[str, Any] = {
    "vocab_size": len(VOCAB), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 80, "pad_token_id": 1,
}
# Family -> its class in transformers, and further config.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1}),
    "modernbert": ("ModernBert", {"local_attention": 8, "cls_token_id": 2, "sep_token_id": 3}),
    "gemma3_text": (
        "Gemma3Text",
        {"use_bidirectional_attention": True, "sliding_window": 9, "num_key_value_heads": 2, "head_dim": 8},
    ),
}


def make_encoder_folder(
    folder: Path, family: str = "bert", mode: str | None = "mean_tokens", num_labels: int = 0, **keys: Any
) -> PreTrainedModel:
    """Write a checkpoint; `mode` is its pooling, `num_labels` makes it a classifier. `keys` go into its config."""
    name, more = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**_SIZES | more | keys)
    torch.manual_seed(7)
    if num_labels:
        config.num_labels = num_labels
        model = getattr(transformers, f"{name}ForSequenceClassification")(config)
    else:
        model = getattr(transformers, f"{name}Model")(config)
    model = model.eval()
    randomise(model)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordPiece({each: index for index, each in enumerate(VOCAB)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if mode is not None:
        places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        listed = [{"path": path, "type": f"sentence_transformers.models.{each}"} for each, path in places.items()]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    return model


def compute_hidden(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Return transformers' final hidden states of one text, [n, 32]."""
    with torch.inference_mode():
        hidden: Tensor = model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).last_hidden_state
    return hidden[0]
