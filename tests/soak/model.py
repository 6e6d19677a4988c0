"""The soak's model: tiny, random, with a vocabulary of real size; it sees images, knows tools, and has adapters."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[2]
# The folder with tokenizers/cl100k_base.tiktoken, and schemas as maskbench_dev.jsonl.
DATA = Path(os.environ.get("SOAK_DATA", ROOT.parent / "shared" / "data"))
RANKS = DATA / "tokenizers" / "cl100k_base.tiktoken"
DEMO = ROOT / "assets" / "demo_model" / "tokenizer.json"
NUM_ADAPTERS = 5
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
IMAGE = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
TEMPLATE = (
    '{% if tools %}Call tools as <tool_call>{"name": ..., "arguments": ...}</tool_call>.\n{{ tools | tojson }}\n'
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] or [] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_model(folder: Path) -> tuple[Path, list[Path], int]:
    """Write the checkpoint and its adapters; returns their folders, and the size of the vocabulary."""
    tokenizer = _read_ranks(RANKS) if RANKS.exists() else Tokenizer.from_file(str(DEMO))
    specials = ["</s>", "<|im_start|>", "<tool_call>", "</tool_call>", *IMAGE]
    tokenizer.add_special_tokens([AddedToken(token) for token in specials])
    base = folder / "base"
    base.mkdir(parents=True)
    tokenizer.save(str(base / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    images = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 4, "merge_size": 2}
    images |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7], "temporal_patch_size": 2}
    (base / "preprocessor_config.json").write_text(json.dumps(images))
    size = tokenizer.get_vocab_size()
    model = _make_weights(tokenizer, size)
    model.save_pretrained(base)
    adapters = []
    for number in range(NUM_ADAPTERS):
        torch.manual_seed(number)
        linears = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
        config = LoraConfig(r=2 + number, lora_alpha=8, target_modules=linears, task_type="CAUSAL_LM")
        tuned = get_peft_model(_make_weights(tokenizer, size), config)
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0.0, 0.2)
        adapters.append(folder / f"adapter{number}")
        tuned.save_pretrained(str(adapters[-1]))
    return base, adapters, size


def _make_weights(tokenizer: Tokenizer, vocab_size: int) -> Any:
    ids = [tokenizer.token_to_id(token) for token in IMAGE]
    vision = {"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2], "mrope_interleaved": True}
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 12, "vocab_size": vocab_size, "max_position_embeddings": 4096}
    text |= {"rope_parameters": rope, "pad_token_id": 0, "tie_word_embeddings": True}
    config = transformers.CONFIG_MAPPING["qwen3_vl"](
        vision_config=vision, text_config=text, image_token_id=ids[0], vision_start_token_id=ids[1],
        vision_end_token_id=ids[2], video_token_id=ids[3], tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name and name.endswith("weight")
            parameter.uniform_(0.5, 1.5) if is_norm else parameter.normal_(0.0, 0.15)
    return model


def _read_ranks(path: Path) -> Tokenizer:
    """Make a byte-level BPE tokenizer of a tiktoken rank file."""
    lines = map(bytes.split, path.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in letters)}
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        merges += sorted(known, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    pairs = [(spelled[left], spelled[right]) for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
