"""Models that see images: logits against transformers, however the prompt is computed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from engine import LLM, RequestOutput, SamplingParams
from tests.engine.vision_folders import SIZES, load_reference, make_picture, make_smolvlm_folder

GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=20, ignore_eos=True)
KINDS = ("smolvlm", "idefics3")
PICTURES = {name: make_picture(size, seed) for seed, (name, size) in enumerate(SIZES.items())}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_smolvlm_folder(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[Any, Any]:
    return load_reference(folder)


def ask(*parts: str | Image.Image) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


CHATS = {
    "small": ask("What is ", PICTURES["small"], "?"),
    "wide": ask(PICTURES["wide"], "Describe it."),
    "tall": ask("Before the image. " * 4, PICTURES["tall"], "Describe it."),
    "two": ask("Compare ", PICTURES["small"], " and ", PICTURES["tall"], "."),
    "none": ask("No image here, just a text of some length."),
}
SHOWN = {"small": ["small"], "wide": ["wide"], "tall": ["tall"], "two": ["small", "tall"], "none": []}


def check(reference: tuple[Any, Any], name: str, output: RequestOutput) -> None:
    """Compare the logprobs of a greedy answer with transformers' at once."""
    model, processor = reference
    pixels = [processor([[PICTURES[shown]]], return_tensors="pt")["pixel_values"][0] for shown in SHOWN[name]]
    more = {"pixel_values": torch.cat(pixels)[None]} if pixels else {}
    answer = output.outputs[0]
    prompt = output.prompt_token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer.token_ids]]), use_cache=False, **more).logits[0]
    expected = logits.log_softmax(-1)
    assert answer.logprobs is not None and len(answer.token_ids) == GREEDY.max_tokens
    for place, found in enumerate(answer.logprobs, len(prompt) - 1):
        assert answer.token_ids[place - len(prompt) + 1] == int(expected[place].argmax())
        for each in found.top:
            assert abs(each.logprob - float(expected[place, each.token_id])) <= 1e-4


def test_a_prompt_is_that_of_transformers(folder: Path, reference: tuple[Any, Any]) -> None:
    model, processor = reference
    if model.config.model_type != "idefics3":
        pytest.skip("its processor needs torchvision, for videos")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    whole = transformers.Idefics3Processor(processor, tokenizer, image_seq_len=4)
    with LLM(str(folder)) as llm:
        for name, chat in CHATS.items():
            (output,) = llm.chat(chat, SamplingParams(max_tokens=1), use_tqdm=False)
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            images = [[PICTURES[shown] for shown in SHOWN[name]]] if SHOWN[name] else None
            assert output.prompt_token_ids == whole(text=[text], images=images)["input_ids"][0]


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}])
def test_answers_about_images_have_the_logprobs_of_transformers(
    folder: Path, reference: tuple[Any, Any], settings: dict[str, Any]
) -> None:
    """Alone, in a mixed batch, in chunks, and after a hit in the prefix cache."""
    with LLM(str(folder), **settings) as llm:
        for name, chat in CHATS.items():
            (output,) = llm.chat(chat, GREEDY, use_tqdm=False)
            assert not output.num_cached_tokens or name in ("two", "none")
            check(reference, name, output)
        for name, output in zip(CHATS, llm.chat(list(CHATS.values()), GREEDY, use_tqdm=False), strict=True):
            assert output.num_cached_tokens
            check(reference, name, output)
    with LLM(str(folder), **settings) as llm:
        for name, output in zip(CHATS, llm.chat(list(CHATS.values()), GREEDY, use_tqdm=False), strict=True):
            check(reference, name, output)
