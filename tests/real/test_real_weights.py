"""Real weights against transformers' reading of the same file, and against themselves in other company."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine import LLM, SamplingParams, inspect_model
from engine.input.tokenizer import Tokenizer
from engine.model import load_model
from grammar import GrammarSpec
from kernels.cpu import make_native_ops
from tests.engine.model.drive import Driver, compute_expected
from tests.kernels.cpu.conftest import require_library

NASTY = [
    "",
    " ",
    "\n\n\t \r\n",
    "Hello, world!",
    "naïve café — “quotes” … ½ ﬁ",
    "日本語のテキスト、中文文本，한국어",
    "مرحبا שלום नमस्ते",
    "👩‍👩‍👧‍👦🇩🇪 e\u0301 \u200b\ufeff",
    "def f(x):\n    return x**2  # 1e-3\n",
    "<|im_end|> </s> <bos> [INST]",
    "0123456789 1,234.56 3.14159",
    "a" * 300,
]
PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "Liebe Grüße aus"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "city": {"type": "string", "maxLength": 20},
        "amount": {"type": "number", "minimum": 0, "maximum": 100000},
        "tags": {"type": "array", "items": {"enum": ["urgent", "paid", "new"]}, "maxItems": 2},
    },
    "required": ["name", "city", "amount", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.soak)])
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def reference(path: Path) -> PreTrainedModel:
    """The model of transformers with the decoded weights."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(model=str(smollm2), max_model_len=512, num_blocks=160) as llm:
        yield llm


def encode(path: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer(path)
    return [tokenizer.encode(text) for text in texts]


def test_tokens_and_texts_are_those_of_transformers(path: Path) -> None:
    ours, theirs = Tokenizer(path), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if path.name.startswith("SmolLM2"):  # as its tokenizer.json has it; transformers splits its GGUF as GPT-2
        single_digits = pre_tokenizers.Digits(individual_digits=True)
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [single_digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    for text in (*NASTY, "total:    12.50\n\n3 items\n   4. it's  ½"):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids).strip() == theirs.decode(ids, skip_special_tokens=True).strip(), text


def test_a_report_has_the_size_and_the_type_of_the_file(smollm2: Path) -> None:
    report = inspect_model(smollm2)
    assert (report.weight_format, report.weight_bytes) == ("Q4_1", smollm2.stat().st_size)


def test_chat_prompts_are_those_of_transformers(smollm2: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    messages = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Yes?"}]
    messages.append({"role": "user", "content": "日本 <b>&amp;</b>"})
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert Tokenizer(smollm2).apply_chat_template(messages) == expected


def test_float32_logits_equal_those_of_transformers(path: Path, reference: PreTrainedModel) -> None:
    """In one piece, in chunks, and beside another request."""
    first, second = encode(path, [" ".join(PROMPTS) * 4, PROMPTS[1] * 3])
    driver = Driver(load_model(path))
    parts = [driver.step({"a": first[:40]})["a"], driver.step({"a": first[40:41], "b": second})["a"]]
    parts.append(driver.step({"a": first[41:]})["a"])
    expected = compute_expected(reference, first)
    torch.testing.assert_close(torch.cat(parts), expected, atol=2e-3, rtol=1e-3)


def test_greedy_texts_equal_those_of_transformers(path: Path, reference: PreTrainedModel) -> None:
    backend: Any = "sdpa"  # torch decodes the weights to float32
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with LLM(model=str(path), max_model_len=256, attention_backend=backend, num_blocks=80) as llm:
        outputs = llm.generate(PROMPTS[:3], params, use_tqdm=False)
    for output in outputs:
        prompt = torch.tensor([output.prompt_token_ids])
        options: dict[str, Any] = {"do_sample": False, "min_new_tokens": 10, "max_new_tokens": 10}
        ids = reference.generate(prompt, attention_mask=torch.ones_like(prompt), eos_token_id=None, **options)
        assert list(output.outputs[0].token_ids) == ids[0, prompt.shape[1] :].tolist()


def test_the_codes_of_the_file_stay_near_float32(path: Path, reference: PreTrainedModel) -> None:
    """The native ops round activations to 8 bits. llama.cpp's divergence on such files is .003 to .05 nats."""
    (ids,) = encode(path, [" ".join(PROMPTS) * 4])
    model = load_model(path, ops=make_native_ops(require_library(), 2))
    actual = Driver(model).step({"a": ids})["a"].log_softmax(-1)
    expected = compute_expected(reference, ids).log_softmax(-1)
    divergence = (expected.exp() * (expected - actual)).sum(-1)[1:].mean()
    assert divergence < 0.02


def test_texts_are_the_same_alone_together_and_from_the_cache(llm: LLM) -> None:
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(4)]
    prompts = [prompt * 12 for prompt in PROMPTS]
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [
        llm.generate([prompt], each, use_tqdm=False)[0] for prompt, each in zip(prompts, params, strict=True)
    ]
    texts = [[output.outputs[0].text for output in outputs] for outputs in (together, alone)]
    assert texts[0] == texts[1]
    assert alone[0].num_cached_tokens


@pytest.mark.soak
def test_drafts_and_chunks_change_no_text(smollm2: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompts = [prompt * 12 for prompt in PROMPTS]
    expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    options: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    options |= {"max_num_batched_tokens": 48, "max_num_seqs": 8}
    with LLM(model=str(smollm2), max_model_len=512, num_blocks=160, **options) as other:
        assert [
            output.outputs[0].text for output in other.generate(prompts, params, use_tqdm=False)
        ] == expected


def test_records_are_valid_and_end(llm: LLM) -> None:
    grammar = GrammarSpec.json_schema(SCHEMA)
    texts = [f"Invoice {n}: {PROMPTS[n % 4]} owes {n * 37 % 900}.50 EUR to the shop." for n in range(10)]
    params = [SamplingParams(temperature=1, seed=n, max_tokens=200, grammar=grammar) for n in range(10)]
    for output in llm.generate(texts, params, use_tqdm=False):
        (completion,) = output.outputs
        assert completion.finish_reason == "stop"
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(completion.text))
