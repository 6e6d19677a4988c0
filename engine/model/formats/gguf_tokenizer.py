"""TokenizersBackend: the tokenizer that transformers builds from the metadata of a GGUF file.

transformers' own reader of the metadata takes longer than all the rest: it makes two arrays of numpy for each token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from tokenizers import Regex, pre_tokenizers
from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

from engine.model.formats.gguf_file import GGUFFile, Strings

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_WORDS_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters with case, but for scripts that DeepSeek V2's list of ranges leaves out: it has no category.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{0560}-\x{0588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8a}\x{2d00}-\x{2d2d}\x{a790}-\x{a7ff}"
    r"\x{ab30}-\x{ab68}\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df2a}]]"
)
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# tokenizer.ggml.pre -> the patterns that split a text one after another, where transformers has none: it would split
# as GPT-2. Source: tokenizer.json of these models; the names are llama.cpp's.
_SPLITS = {
    **dict.fromkeys(
        ("codeshell", "command-r", "exaone", "mellum2", "minerva-7b", "refact", "smollm", "starcoder"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(
        ("chatglm-bpe", "glm4"), (rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",)
    ),
    **dict.fromkeys(
        ("grok-2", "hunyuan", "solar-open", "stablelm2"),
        (rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",),
    ),
    "seed-coder": (rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _WORDS_V3)),
    "deepseek-llm": (
        r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}",
    ),
    "minicpm5": (r"\p{N}{1,3}", rf"{_WORDS}|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"),
}
# Split as GPT-2, or without a name.
_AS_GPT2 = (
    "a.x-4.0", "default", "exaone4", "gigachat", "gpt-2", "granite-docling", "jais", "mellum", "mpt", "olmo", "phi-2",
    "trillion",
)
# A word that is a token is not merged, and texts begin with a BOS token if the file does not say otherwise.
_AS_LLAMA3 = ("llama-bpe", "llama-v3", "llama3", "pixtral", "tekken")


class TokenizersBackend(transformers.PreTrainedTokenizerFast):  # type: ignore[misc]
    """For `from_pretrained`, which also reads the files beside the GGUF file. Clients see the name of the class."""

    def __init__(self, *args: Any, gguf_file: str, name_or_path: str, **settings: Any) -> None:
        architecture, parts, config = _read_parts(GGUFFile(Path(name_or_path) / gguf_file))
        self._tokenizer, more = mapping.convert_gguf_tokenizer(architecture, parts)
        if parts.get("tokenizer_type") == "gpt2":
            _split_words(self._tokenizer, parts.get("pre_tokenizer_type", "default"))
        super().__init__(*args, name_or_path=name_or_path, **{**settings, **config, **more})


def _read_parts(file: GGUFFile) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """As `get_gguf_tokenizer` of transformers: the architecture, the parts of the tokenizer, and its settings."""
    metadata: dict[str, Any] = {
        name: file.read_strings(value) if isinstance(value, Strings) and name.startswith("tokenizer.") else value
        for name, value in file.metadata.items()
    }
    parts, config = (
        {name: metadata[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in metadata}
        for names in map(mapping.GGUF_TOKENIZER_MAPPING.__getitem__, ("tokenizer", "tokenizer_config"))
    )
    kind, split = parts.get("tokenizer_type"), parts.get("pre_tokenizer_type")
    for name in ("tokens", "merges") if kind == "gpt2" else ("tokens",):
        if name not in parts:
            raise ValueError(f"tokenizer.ggml.{name} is missing")
    if kind == "llama" or (kind == "gpt2" and split in _AS_LLAMA3):
        config.setdefault("add_bos_token", True)
    elif kind == "gemma4":
        config["add_bos_token"] = False  # its chat template writes the token
    for name, key in _NAMED.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is not None and token_id >= len(parts["tokens"]):
            raise ValueError(f"tokenizer.ggml.{key}={token_id} must be below {len(parts['tokens'])}, the token count")
        config[name] = None if token_id is None else parts["tokens"][token_id]
    return metadata["general.architecture"], parts, config


def _split_words(tokenizer: Any, name: str) -> None:
    """Let a byte-level tokenizer split texts into words as its name says."""
    if name not in (*mapping.GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT2, *_SPLITS):
        raise ValueError(f"tokenizer.ggml.pre={name!r} is not supported; --tokenizer takes a folder with another")
    if name in _SPLITS:
        steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[name]]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    tokenizer.model.ignore_merges = name in _AS_LLAMA3
