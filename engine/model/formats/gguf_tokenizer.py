"""TokenizersBackend: the tokenizer that transformers builds from the metadata of a GGUF file.

transformers' own reader of the metadata takes longer than all the rest: it makes two arrays of numpy for each token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

from engine.model.formats.gguf_file import GGUFFile, Strings

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class TokenizersBackend(transformers.PreTrainedTokenizerFast):  # type: ignore[misc]
    """For `from_pretrained`, which also reads the files beside the GGUF file. Clients see the name of the class."""

    def __init__(self, *args: Any, gguf_file: str, name_or_path: str, **settings: Any) -> None:
        architecture, parts, config = _read_parts(GGUFFile(Path(name_or_path) / gguf_file))
        self._tokenizer, more = mapping.convert_gguf_tokenizer(architecture, parts)
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
    if parts.get("tokenizer_type") == "llama":
        config.setdefault("add_bos_token", True)
    elif parts.get("tokenizer_type") == "gemma4":
        config["add_bos_token"] = False  # its chat template writes the token
    for name, key in _NAMED.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        config[name] = None if token_id is None else parts["tokens"][token_id]
    return metadata["general.architecture"], parts, config
