"""Small tokenizers trained on the spot and written as checkpoint folders, one for each way of decoding."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, hello world and hello again.",
    "naïve café Zürich, 日本語 日本 中文, привет мир, नमस्ते 🙂 🙂 👩‍👩‍👧 e\u0301",
    '{"name": "value", "list": [1, 2, 3]}  two  spaces\n\nand lines\n',
] * 4
CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'bad' %}{{ raise_exception('no role bad') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ mood }}{% endif %}"
)


def make_byte_level_folder(folder: Path, **config: Any) -> Path:
    """Like GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, specials = pre_tokenizers.ByteLevel.alphabet(), ["<s>", "</s>", "<|é|>"]
    trainer = BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("   "), AddedToken("日本語です")])
    return _write(tokenizer, folder, config)


def make_byte_fallback_folder(folder: Path, **config: Any) -> Path:
    """Like Llama 2 and Mistral 7B: sentencepiece with <0xNN> tokens, one space dropped at the start."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS[:1], BpeTrainer(vocab_size=120, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    specials = ["<unk>", "<s>", "</s>"]
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*sorted(model["vocab"], key=model["vocab"].get), "▁▁", "▁é", "日"]
    vocab = {token: token_id for token_id, token in enumerate(dict.fromkeys(tokens))}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return _write(tokenizer, folder, config)


def make_metaspace_folder(folder: Path, **config: Any) -> Path:
    """Like other sentencepiece conversions: the first token loses its space marks."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    specials = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(CORPUS, BpeTrainer(vocab_size=300, special_tokens=specials, show_progress=False))
    return _write(tokenizer, folder, config)


def make_word_piece_folder(folder: Path, **config: Any) -> Path:
    """A decoder that is no plain concatenation of bytes."""
    words = ["[UNK]", "<s>", "</s>", "hello", "world", "##ing", "##s", ",", "日", "##本"]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return _write(tokenizer, folder, config)


def _write(tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described | config), encoding="utf-8")
    return folder
