"""The tokenizer: byte-level BPE in which the space, each digit and each run of JSON punctuation stand alone.

A name is cut the same way after a space in the document and after a quote in the JSON, so that copying a
value is copying tokens.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ..prompt import CHAT_TEMPLATE, SPECIAL_TOKENS, SYSTEM_PROMPT
from ..writing.chat import sample_chat
from ..writing.phrases import chance
from .examples import ask, sample_extraction, write_answer

PATTERN = r"""\p{L}+|\p{N}|\n+|["{}\[\]:,]+(?: ["{}\[\]:,]+)*|[^\p{L}\p{N}\n]"""
VOCABULARY_SIZE = 3072


def sample_texts(count: int, rng: Random) -> Iterator[str]:
    """Prompts, answers and dialogues of the mix."""
    for _ in range(count):
        if chance(rng, 0.15):
            yield from (message["content"] for message in sample_chat(rng))
        else:
            (document,), schema = sample_extraction(rng, long_share=0.0)
            prompt, _ = ask(document, schema, rng)
            yield from (message["content"] for message in prompt)
            yield write_answer(document.record).text
    for _ in range(100):
        yield f"{SYSTEM_PROMPT} system user assistant"


def make_tokenizer() -> Tokenizer:
    """An untrained tokenizer with the project's way of cutting."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts: Iterator[str], vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    tokenizer = make_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=3,
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that `AutoTokenizer.from_pretrained` reads, chat template included."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer on text of the recipe.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer files")
    parser.add_argument("--texts", type=int, default=30000, help="number of examples to learn from")
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    tokenizer = train_tokenizer(sample_texts(args.texts, Random(args.seed)))
    args.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, args.out)
    print(f"{tokenizer.get_vocab_size()} tokens -> {args.out}")


if __name__ == "__main__":
    main()
