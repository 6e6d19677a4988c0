"""Tiny random checkpoints that see images, with tokenizer and image processor, and pictures for them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel

SIZES = {"small": (40, 30), "wide": (90, 40), "tall": (45, 130)}
_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}:{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}SLOT{% else %}{{ p['text'] }}{% endif %}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_STRING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}:{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


SMALL_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL_TEXT = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL_TEXT |= {"num_key_value_heads": 2, "head_dim": 12, "vocab_size": 384, "max_position_embeddings": 1024}
SMALL_TEXT |= {"pad_token_id": 0}


def make_picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 255, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def to_bytes(picture: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()


def make_smolvlm_folder(
    folder: Path,
    model_type: str = "smolvlm",
    takes_parts: bool = True,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    tile: int = 32,
    scale: int = 2,
) -> Path:
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    specials = ["<image>", "<fake_token_around_image>", "<global-img>", *tiles]
    token_id = _write_tokenizer(folder, specials, "<image>", takes_parts)
    fields = {
        "vision_config": SMALL_VISION | {"image_size": 32, "patch_size": 8} | (vision or {}),
        "text_config": SMALL_TEXT | {"model_type": "llama"} | (text or {}),
        "scale_factor": scale,
        "image_token_id": token_id,
    }
    _write_model(folder, model_type, fields)
    settings = {"size": {"longest_edge": 3 * tile}, "max_image_size": {"longest_edge": tile}}
    settings |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7], "do_image_splitting": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def make_qwen_vl_folder(folder: Path, model_type: str = "qwen3_vl", takes_parts: bool = True) -> Path:
    specials = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
    slot = "<|vision_start|><|image_pad|><|vision_end|>"
    token_id = _write_tokenizer(folder, specials, slot, takes_parts)
    vision = {"depth": 3, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    if model_type == "qwen3_vl":
        vision |= {"patch_size": 4, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        rope |= {"mrope_interleaved": True}
    else:  # windows of 2 x 2 features
        vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
    ids = {"image_token_id": token_id, "vision_start_token_id": token_id + 1}
    ids |= {"vision_end_token_id": token_id + 2, "video_token_id": token_id + 3}
    text = SMALL_TEXT | {"rope_parameters": rope}
    _write_model(folder, model_type, {"vision_config": vision, "text_config": text, **ids})
    settings = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 4, "merge_size": 2}
    settings |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7], "temporal_patch_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def load_reference(folder: Path) -> tuple[PreTrainedModel, Any]:
    """Return transformers' model, and its image processor."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    kind = {"smolvlm": "SmolVLMImageProcessorPil", "idefics3": "Idefics3ImageProcessorPil"}
    kind["qwen3_vl"] = kind["qwen2_5_vl"] = "Qwen2VLImageProcessorPil"
    return model, getattr(transformers, kind[model.config.model_type]).from_pretrained(folder)


def _write_model(folder: Path, model_type: str, fields: dict[str, Any]) -> None:
    config = transformers.CONFIG_MAPPING[model_type](**fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name and name.endswith("weight")
            parameter.uniform_(0.5, 1.5) if is_norm else parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path, specials: list[str], slot: str, takes_parts: bool) -> int:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token) for token in ["</s>", "<|im_start|>", *specials]])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = _PARTS.replace("SLOT", slot) if takes_parts else _STRING
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return int(tokenizer.token_to_id(specials[0]))
