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

from engine.input.images.lfm2_vl import Processor

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
    elif model_type == "qwen2_vl":
        vision = {"depth": 3, "num_heads": 2, "embed_dim": 32, "mlp_ratio": 2, "hidden_size": 48, "patch_size": 4}
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


def make_pixtral_folder(folder: Path, model_type: str = "mistral3", takes_parts: bool = True) -> Path:
    token_id = _write_tokenizer(folder, ["[IMG]", "[IMG_BREAK]", "[IMG_END]"], "[IMG]", takes_parts)
    vision = SMALL_VISION | {"image_size": 32, "patch_size": 4, "head_dim": 16}
    fields = {"vision_config": vision, "text_config": SMALL_TEXT | {"model_type": "mistral"}}
    _write_model(folder, model_type, fields | {"image_token_index": token_id, "tie_word_embeddings": False})
    settings = {"size": {"longest_edge": 64}, "patch_size": 8}
    settings |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def make_gemma3_folder(folder: Path, model_type: str = "gemma3", takes_parts: bool = True) -> Path:
    """Images of 9 tokens, which are longer than what is left of a window of 20 behind a long text."""
    specials = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]
    token_id = _write_tokenizer(folder, specials, "<start_of_image>", takes_parts)
    vision = SMALL_VISION | {"image_size": 48, "patch_size": 8, "vision_use_head": False}
    text = SMALL_TEXT | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    fields = {"vision_config": vision, "text_config": text | {"sliding_window": 20, "query_pre_attn_scalar": 12}}
    fields |= {"mm_tokens_per_image": 9, "image_token_index": token_id, "boi_token_index": token_id + 1}
    _write_model(folder, model_type, fields | {"eoi_token_index": token_id + 2})
    settings = {"size": {"height": 48, "width": 48}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def make_lfm2_vl_folder(folder: Path, model_type: str = "lfm2_vl", takes_parts: bool = True) -> Path:
    tiles = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    specials = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *tiles]
    token_id = _write_tokenizer(folder, specials, "<image>", takes_parts)
    vision = SMALL_VISION | {"model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 64}
    text = SMALL_TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]}
    text |= {"block_multiple_of": 8, "conv_L_cache": 3}
    fields = {"vision_config": vision | {"vision_use_head": False}, "text_config": text}
    _write_model(folder, model_type, fields | {"image_token_id": token_id, "projector_hidden_size": 40})
    settings = {"encoder_patch_size": 4, "tile_size": 32, "min_image_tokens": 4, "max_image_tokens": 16}
    settings |= {"max_tiles": 4, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def prepare_lfm2_vl(folder: Path, pictures: list[Image.Image]) -> dict[str, torch.Tensor]:
    """Return what transformers' image processor, which needs torchvision, makes of pixels resized by ours."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    mean, std = (torch.tensor(settings[name]) for name in ("image_mean", "image_std"))
    parts: list[torch.Tensor] = []
    sizes: list[list[int]] = []
    for picture in pictures:
        pixels, (rows, columns, *grid) = Processor(folder, {}).prepare(picture)
        more = [[2 * size for size in grid[:2]]] * (rows * columns) + [[2 * size for size in grid[2:]]]
        numbers = (torch.from_numpy(pixels).transpose(1, 2) / 255 - mean) / std
        parts += numbers.flatten(1).split([height * width for height, width in more])
        sizes += more
    return {
        "pixel_values": torch.nn.utils.rnn.pad_sequence(parts, batch_first=True),
        "pixel_attention_mask": torch.nn.utils.rnn.pad_sequence(
            [torch.ones(len(part), dtype=torch.int32) for part in parts], batch_first=True
        ),
        "spatial_shapes": torch.tensor(sizes),
    }


def load_reference(folder: Path) -> tuple[PreTrainedModel, Any]:
    """Return transformers' model, and its image processor."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    kind = {"smolvlm": "SmolVLMImageProcessorPil", "idefics3": "Idefics3ImageProcessorPil"}
    kind |= dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "Qwen2VLImageProcessorPil")
    kind["gemma3"] = "Gemma3ImageProcessorPil"
    kind["mistral3"] = "PixtralImageProcessorPil"
    if model.config.model_type == "lfm2_vl":
        return model, lambda pictures, return_tensors: prepare_lfm2_vl(folder, pictures)
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
