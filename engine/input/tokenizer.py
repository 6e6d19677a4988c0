"""Tokenizer: text to token ids and back, chat templates, and the bytes of every token.

A thin wrapper around transformers. PreTrainedTokenizerFast reads `tokenizer.json` exactly as published.
AutoTokenizer is used only without that file, because it imports more slowly and rebuilds some tokenizers.
Methods are thread-safe: the Rust tokenizer is read-only after loading, and encoding releases the GIL. Truncation
and padding, which transformers would switch per call, are disabled. A tokenizer written in Python relies on the GIL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
import transformers

from engine.cache_folder import CacheFolder, hash_inputs
from engine.errors import ConfigError, InvalidRequest
from engine.input.chat_messages import read_messages
from engine.input.incremental_text import IncrementalText, TextRule, TokenPieces, WindowedText, read_text_rule
from engine.input.special_token_escaper import SpecialTokenEscaper
from engine.model import read_eos_token_ids
from engine.model.checkpoint import read_json_object, resolve_checkpoint
from engine.model.formats.gguf_file import GGUFFile, is_gguf, resolve_gguf

TOKENIZER_PATTERNS = (
    *("*token*", "*.model", "vocab.*", "merges.txt", "tekken.json"),
    *("*.jinja", "chat_template.json", "config.json", "generation_config.json"),
)
_JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_PAIR = re.compile(r'\["([^"\\]*+(?:\\.[^"\\]*+)*+)","([^"\\]*+(?:\\.[^"\\]*+)*+)"\]')  # of strings in JSON
_GGUF_VERSION = "2"  # of our reading; tokenizers in the cache that another one has made are not used
# What transformers reads from a GGUF file beside the tokenizer itself.
_GGUF_SETTINGS = ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "add_bos_token", "add_eos_token")
RESERVED_TEMPLATE_KWARGS = frozenset(
    {"self", "messages", "conversation", "conversations", "tools", "chat_template", "tokenize", "documents"}
    | {"add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
    | {"sanitize_control_tokens"}
)
# Errors that a sandboxed template can raise for messages it does not support.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)


class Tokenizer:
    """The tokenizer of one checkpoint.

    Args:
        path_or_name: a folder, or the name of a hub repository.
        model: the checkpoint to serve, which defines the EOS tokens; None: the same as `path_or_name`.
        cache: where what a GGUF file's tokenizer was built into is kept; None: nowhere.

    Raises:
        ConfigError: the tokenizer is missing or cannot be read.
    """

    def __init__(
        self, path_or_name: str | Path, model: str | Path | None = None, cache: CacheFolder | None = None,
    ) -> None:
        self.name = str(path_or_name)
        field = "model" if model is None else "tokenizer"
        if is_gguf(path_or_name):
            source = resolve_gguf(path_or_name)
            self._tokenizer = _load_gguf(source, self.name, cache)
        else:
            source = resolve_checkpoint(path_or_name, TOKENIZER_PATTERNS, field)
            self._tokenizer = _load_folder(source, self.name)
        self._backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self.eos_token_ids = read_eos_token_ids(model or source, self._tokenizer.eos_token_id)
        self._special_ids = self._read_special_ids()
        self._image_slot: str | None = None  # text of an image's token; None: the model does not see images
        self._takes_parts = False  # whether the chat template writes content parts itself
        self._rule: TextRule | None = None
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            decoder = self._backend.decoder
            self._rule = read_text_rule(None if decoder is None else json.loads(decoder.__getstate__()))
        self._escaper = (
            None
            if self._backend is None
            else SpecialTokenEscaper(self._backend, [*self.special_tokens(self.vocab_size)])
        )
        self._pieces = self._make_pieces(())
        self._pieces_without_special = self._make_pieces(self._special_ids)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included. The model's logits may have more columns."""
        return len(self._tokenizer)

    @cached_property
    def max_token_chars(self) -> int:
        """Upper bound for the characters that one prompt token stands for.

        It is four times the longest entry, since normalisation may merge characters, such as a letter and its accent.
        """
        return 4 * max(map(len, self._tokenizer.get_vocab()))

    def describe(self) -> dict[str, Any]:
        """Return the class, the chat template and the special tokens under transformers' names."""
        one = self._tokenizer
        names = ("chat_template", "bos_token", "eos_token", "pad_token", "unk_token", "vocab_size")
        return {"tokenizer_class": type(one).__name__} | {name: getattr(one, name, None) for name in names}

    @property
    def source(self) -> Any:
        """The tokenizer of transformers."""
        return self._tokenizer

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.bos_token_id

    @property
    def pad_token_id(self) -> int | None:
        return self._tokenizer.pad_token_id

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Special tokens spelled out in it are encoded as special tokens."""
        try:
            if self._backend is None:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            # The batch call releases the GIL throughout; the fast variant computes no offsets.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"the text is not valid Unicode: {error}", "prompt") from error

    def encode_whole(
        self, text: str, second: str | None = None, max_tokens: int | None = None
    ) -> tuple[list[int], int | None, bool]:
        """Return the ids of a text, or of a pair, between the special tokens that the model reads around it.

        Args:
            max_tokens: the longer text is cut until this many tokens are left, special tokens included.

        Returns the ids, the place of the first token that is marked as one of the second text, and whether it was cut.
        """
        backend, texts = self._backend, [text] if second is None else [text, second]
        if backend is None:
            if second is not None:
                raise InvalidRequest("pairs of texts need a model with a tokenizer.json", "model")
            ids = self.encode(text)
            return ids[:max_tokens], None, max_tokens is not None and len(ids) > max_tokens
        if max_tokens is not None:
            texts = [each[: (max_tokens + 1) * self.max_token_chars] for each in texts]
        try:
            parts = backend.encode_batch(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"the text is not valid Unicode: {error}", "prompt") from error
        num_special = backend.num_special_tokens_to_add(second is not None)
        is_cut = max_tokens is not None and sum(map(len, parts)) + num_special > max_tokens
        if max_tokens is not None and is_cut:
            if (room := max_tokens - num_special) < len(parts):
                message = f"truncate_prompt_tokens={max_tokens} must be at least {num_special + len(parts)}"
                raise InvalidRequest(message, "truncate_prompt_tokens")
            short = 0 if second is None else min(room // 2, *map(len, parts))
            for part in parts:
                part.truncate(short if len(part) == short else room - short)
            if second is not None and sum(map(len, parts)) > room:  # both were longer than half of an odd room
                parts[1].truncate(short)
        found = backend.post_process(*parts, add_special_tokens=True)
        return found.ids, found.type_ids.index(1) if 1 in found.type_ids else None, is_cut

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids beyond the vocabulary are ignored."""
        try:
            if self._backend is not None:
                return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            known_ids = [token_id for token_id in token_ids if token_id < self.vocab_size]
            return self._tokenizer.decode(
                known_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        except (OverflowError, TypeError) as error:
            message = f"token ids must be integers from 0 to {self.vocab_size - 1}: {error}"
            raise InvalidRequest(message, "tokens") from error

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], /, *, tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True, continue_final_message: bool = False, **kwargs: Any,
    ) -> str:
        """Render a conversation. The text has its special tokens: encode it with `add_special_tokens=False`.

        Args:
            messages: each with a role and a content, which is a string or a list of parts such as
                {"type": "text", "text": ...}; the template gets the texts of all parts joined.
            continue_final_message: leave the last message open; needs `add_generation_prompt=False`.
            kwargs: more template variables.

        Raises:
            InvalidRequest: there is no template, or it rejects the messages; a message has no role or no text;
                `kwargs` contains a reserved name.
        """
        refuse_reserved_kwargs(kwargs)
        read, _ = read_messages(messages)
        if not self.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template. Use the completions API, "
                "or put a chat_template.jinja into the model's folder",
                "messages",
            )
        if self._image_slot is not None:
            read = [message | {"content": self._lay_out(message["content"])} for message in read]
        elif not all(isinstance(message["content"], str) for message in read):
            raise InvalidRequest("this model does not see images: send text only", "messages")
        try:
            return self._tokenizer.apply_chat_template(
                read, tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
                tokenize=False, **kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template rejected the messages: {reason}", "messages") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        """Return the token ids of a conversation under the chat template.

        Special tokens spelled out by users and tools are encoded as ordinary text.
        Messages, options and errors are those of `apply_chat_template`.
        """
        if self._escaper is None:
            return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)
        escaped, replaced = self._escaper.escape(read_messages(messages)[0])
        text = self.apply_chat_template(escaped, **options)
        return (
            self._escaper.encode(text, replaced) if replaced else self.encode(text, add_special_tokens=False)
        )

    def show_images(self, slot: str) -> None:
        """Let the chat template write the slots of images; `slot` is the text of one."""
        self._image_slot = slot
        probe = "probe of content parts"
        with suppress(*_TEMPLATE_ERRORS):
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": [{"type": "text", "text": probe}]}], tokenize=False
            )
            self._takes_parts = probe in text and "'type'" not in text and '"type"' not in text

    def _lay_out(self, content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
        """Return content in the form that the chat template reads."""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if self._takes_parts:
            return parts
        return "".join(part.get("text", self._image_slot) or "" for part in parts)

    def encode_framed(self, before: str, text: str, after: str) -> list[int]:
        """Return the token ids of a text in a frame; special tokens count in the frame alone."""
        if self._escaper is None:
            return self.encode(before + text + after, add_special_tokens=False)
        (escaped,), replaced = self._escaper.escape([{"role": "user", "content": text}])
        framed = before + escaped["content"] + after
        return (
            self._escaper.encode(framed, replaced)
            if replaced
            else self.encode(framed, add_special_tokens=False)
        )

    def make_text(
        self, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> IncrementalText | WindowedText:
        """Return a decoder for one output stream that continues this prompt."""
        pieces = self._pieces_without_special if skip_special_tokens else self._pieces
        if pieces is not None:
            return IncrementalText(pieces, prompt_token_ids)
        return WindowedText(partial(self.decode, skip_special_tokens=skip_special_tokens), prompt_token_ids)

    def token_piece(self, token_id: int) -> str | bytes:
        """Return the text of one token, special tokens included; bytes if it may be part of a character."""
        if self._pieces is None:
            return self.decode([token_id], skip_special_tokens=False)
        return self._pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """Return the text of one token for display, with U+FFFD for parts of characters."""
        piece = self.token_piece(token_id)
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def token_bytes(self, vocab_size: int) -> list[bytes]:
        """Return the exact bytes of ids 0 to `vocab_size` - 1, for grammars; b"" for special tokens and unused ids.

        Raises:
            ConfigError: the tokenizer's decoder is not supported, so the bytes of tokens are unknown.
        """
        if self._rule is None or self._backend is None:
            raise ConfigError(
                f"tokenizer of {self.name}: structured output needs a byte-level or sentencepiece "
                f"tokenizer.json; this one's decoder is {getattr(self._backend, 'decoder', None)}"
            )
        table = [b""] * vocab_size
        for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            if token_id < vocab_size and token_id not in self._special_ids:
                table[token_id] = self._rule.make_bytes(token)
        return table

    def special_tokens(self, vocab_size: int) -> dict[str, int]:
        """Return name -> id of the special tokens below `vocab_size`, to which structural tags may refer."""
        if self._backend is None:
            return {}
        added = self._backend.get_added_tokens_decoder()
        return {added[i].content: i for i in sorted(self._special_ids) if i < vocab_size and i in added}

    def _make_pieces(self, skipped_ids: Iterable[int]) -> TokenPieces | None:
        if self._rule is None or self._backend is None:
            return None
        return TokenPieces(self._rule, _make_id_to_token(self._backend), frozenset(skipped_ids))

    def _read_special_ids(self) -> frozenset[int]:
        if self._backend is None:
            return frozenset(self._tokenizer.all_special_ids)
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)


def refuse_reserved_kwargs(kwargs: Iterable[str]) -> None:
    """Reject template variables that are parameters here, or that would change the type of the result."""
    for name in kwargs:
        if name in RESERVED_TEMPLATE_KWARGS or not name.isidentifier():
            raise InvalidRequest(f"chat_template_kwargs must not set {name[:80]!r}", "chat_template_kwargs")


def _make_id_to_token(backend: Any) -> Callable[[int], str | None]:
    def id_to_token(token_id: int) -> str | None:
        return backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    return id_to_token


def _load_gguf(path: Path, name: str, cache: CacheFolder | None) -> Any:
    """Load the tokenizer of a GGUF file, which transformers builds in several times the time that a file takes."""
    GGUFFile(path)  # says what is wrong with a file that is not GGUF
    # transformers reads some of the files beside it.
    files = [path, *sorted(each for pattern in TOKENIZER_PATTERNS for each in path.parent.glob(pattern))]
    key = hash_inputs(files, transformers.__version__, tokenizers.__version__, _GGUF_VERSION)
    names = [f"{key}.{part}.json" for part in ("settings", "tokenizer")]
    settings, file = (None if cache is None else cache.find(each) for each in names)
    if settings is not None and file is not None:
        with suppress(Exception):  # as below: a broken file is written again
            kept = json.loads(settings.read_text("utf-8"))
            return transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), **kept)
    try:
        # Imported here, because it takes 0.3 s, and a later start reads the file in the cache.
        backend = import_module("engine.model.formats.gguf_tokenizer").TokenizersBackend
        tokenizer: Any = backend.from_pretrained(path.parent.absolute(), gguf_file=path.name, trust_remote_code=False)
    except Exception as error:  # as below
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"tokenizer={name!r}: the file has no usable tokenizer. {reason}") from error
    if cache is not None:
        kept = {key: value for key, value in tokenizer.init_kwargs.items() if key in _GGUF_SETTINGS}
        contents = json.dumps(kept).encode(), _join_merges(tokenizer.backend_tokenizer.to_str()).encode()
        for each, content in zip(names, contents, strict=True):
            cache.write(each, [content], len(content))
    return tokenizer


def _join_merges(text: str) -> str:
    """Write each merge of a `tokenizer.json` as one string, which loads faster and in half the memory."""
    before, mark, merges = text.rpartition('"merges":[')
    return before + mark + _PAIR.sub(r'"\1 \2"', merges) if mark and " " not in merges else text


def _load_folder(folder: Path, name: str) -> Any:
    has_json = (folder / "tokenizer.json").is_file()
    loader = transformers.PreTrainedTokenizerFast if has_json else transformers.AutoTokenizer
    try:
        # Absolute, because transformers may take a relative folder for a hub name.
        tokenizer = loader.from_pretrained(folder.absolute(), trust_remote_code=False)
    except Exception as error:  # the Rust library raises plain Exception on a broken file
        reason = _find_broken_file(folder) or " ".join(str(error).split())[:300] or type(error).__name__
        if (folder / "tokenizer.model").is_file() and find_spec("sentencepiece") is None:
            reason = "Its tokenizer.model needs sentencepiece, which is missing: pip install sentencepiece"
        message = f"tokenizer={name!r} has no usable tokenizer; expected a tokenizer.json there. {reason}"
        raise ConfigError(message) from error
    # Models for images have their template there, which transformers gives to their processors alone.
    path = folder / "chat_template.json"
    if not tokenizer.chat_template and path.is_file():
        tokenizer.chat_template = read_json_object(path).get("chat_template")
    return tokenizer


def _find_broken_file(folder: Path) -> str:
    """Describe the first file that is not a JSON object; transformers would not name the file."""
    for path in [folder / name for name in _JSON_FILES if (folder / name).is_file()]:
        try:
            read_json_object(path)
        except ConfigError as error:
            return str(error)
    return ""
