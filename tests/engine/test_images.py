"""Models that see images: logits against transformers, however the prompt is computed."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from engine import (
    LLM,
    Engine,
    EngineConfig,
    EngineError,
    InvalidRequest,
    RequestOutput,
    SamplingParams,
    read_journal,
)
from engine.actors.opener import Opener
from engine.input.images import intake, lfm2_vl
from engine.model.vision.encoder import ImageEncoder
from tests.engine.vision_folders import (
    SIZES,
    load_reference,
    make_gemma3_folder,
    make_lfm2_vl_folder,
    make_picture,
    make_pixtral_folder,
    make_qwen_vl_folder,
    make_smolvlm_folder,
    to_bytes,
)

GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=20, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=20, seed=5, ignore_eos=True)
KINDS = {"idefics3": make_smolvlm_folder, "smolvlm": make_smolvlm_folder, "mistral3": make_pixtral_folder}
KINDS |= {"lfm2_vl": make_lfm2_vl_folder, "gemma3": make_gemma3_folder}
KINDS |= dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), make_qwen_vl_folder)
LATER = ("smolvlm", "qwen2_vl")  # nearly the same as another kind
PICTURES = {name: make_picture(size, seed) for seed, (name, size) in enumerate(SIZES.items())}


@pytest.fixture(
    scope="module", params=[pytest.param(each, marks=[pytest.mark.soak] * (each in LATER)) for each in KINDS]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[request.param](tmp_path_factory.mktemp("vision"), request.param)


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
    answer, prompt = output.outputs[0], output.prompt_token_ids
    more: dict[str, Any] = {}
    kind, pictures = model.config.model_type, [PICTURES[shown] for shown in SHOWN[name]]
    if pictures and kind in ("idefics3", "smolvlm"):
        found = [processor([[picture]], return_tensors="pt") for picture in pictures]
        more = {"pixel_values": torch.cat([each["pixel_values"][0] for each in found])[None]}
    elif pictures:
        more = dict(processor(pictures, return_tensors="pt"))
    whole = torch.tensor([[*prompt, *answer.token_ids]])
    is_image = (whole == model.config.image_token_id).int()
    is_image[:, len(prompt) :] = 0
    if kind == "gemma3":
        more = {"pixel_values": more.get("pixel_values"), "token_type_ids": is_image}
    elif pictures and kind.startswith("qwen"):
        more["mm_token_type_ids"] = is_image
    with torch.inference_mode():
        logits = model(whole, use_cache=False, **more).logits[0]
    expected = logits.log_softmax(-1)
    assert answer.logprobs is not None and len(answer.token_ids) == GREEDY.max_tokens
    for place, found in enumerate(answer.logprobs, len(prompt) - 1):
        assert answer.token_ids[place - len(prompt) + 1] == int(expected[place].argmax())
        for each in found.top:
            assert abs(each.logprob - float(expected[place, each.token_id])) <= 1e-4


def expand_gemma3(tokenizer: Any, text: list[str], images: list[Any] | None) -> dict[str, Any]:
    """Replace each slot as Gemma3Processor does, which needs torchvision."""
    slot = "<start_of_image>"
    image = f"\n\n{slot}{'<image_soft_token>' * 9}<end_of_image>\n\n"
    return {"input_ids": [tokenizer(text[0].replace(slot, image))["input_ids"]]}


def expand_pixtral(processor: Any, tokenizer: Any, text: list[str], images: list[Any] | None) -> dict[str, Any]:
    """Replace each slot as PixtralProcessor does, which needs torchvision."""
    first, *rest = text[0].split("[IMG]")
    for (height, width), part in zip(processor(images[0])["image_sizes"] if images else [], rest, strict=True):
        row = "[IMG]" * (width // 8) + "[IMG_BREAK]"
        first += (row * (height // 8)).removesuffix("[IMG_BREAK]") + "[IMG_END]" + part
    return {"input_ids": [tokenizer(first)["input_ids"]]}


def test_a_prompt_is_that_of_transformers(folder: Path, reference: tuple[Any, Any]) -> None:
    model, processor = reference
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    whole: Any = partial(expand_pixtral, processor, tokenizer)
    if model.config.model_type == "idefics3":
        whole = transformers.Idefics3Processor(processor, tokenizer, image_seq_len=4)
    elif model.config.model_type == "gemma3":
        whole = partial(expand_gemma3, tokenizer)
    elif model.config.model_type != "mistral3":
        pytest.skip("its processor needs torchvision, for videos")
    with LLM(str(folder), num_blocks=400) as llm:
        for name, chat in CHATS.items():
            (output,) = llm.chat(chat, SamplingParams(max_tokens=1), use_tqdm=False)
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            images = [[PICTURES[shown] for shown in SHOWN[name]]] if SHOWN[name] else None
            assert output.prompt_token_ids == whole(text=[text], images=images)["input_ids"][0]


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((10, 10), [0, 0, 16, 16, 8, 8]), ((512, 384), [0, 0, 16, 16, 12, 16]), ((33, 900), [0, 0, 16, 16, 42, 2]),
        ((1000, 700), [2, 3, 16, 16, 13, 19]), ((600, 2400), [4, 1, 16, 16, 32, 8]),
        ((3000, 3000), [3, 3, 16, 16, 16, 16]),
    ],
)
def test_an_image_is_cut_as_the_processor_of_lfm2_vl_cuts_it(
    size: tuple[int, int], grid: list[int], tmp_path: Path
) -> None:
    """Grids of transformers' processor, which needs torchvision."""
    (tmp_path / "preprocessor_config.json").write_text("{}")
    pixels, found = lfm2_vl.Processor(tmp_path, {}).prepare(make_picture(size))
    assert found == grid
    assert pixels.shape == (4 * (found[0] * found[1] * 256 + found[4] * found[5]), 3, 256)


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.soak), {"max_num_batched_tokens": 16, "max_num_seqs": 8}],
)
def test_answers_about_images_have_the_logprobs_of_transformers(
    folder: Path, reference: tuple[Any, Any], settings: dict[str, Any]
) -> None:
    """Alone, in a mixed batch, in chunks, and after a hit in the prefix cache."""
    with LLM(str(folder), num_blocks=400, **settings) as llm:
        for name, chat in CHATS.items():
            (output,) = llm.chat(chat, GREEDY, use_tqdm=False)
            assert not output.num_cached_tokens or name in ("two", "none")
            check(reference, name, output)
        for name, output in zip(CHATS, llm.chat(list(CHATS.values()), GREEDY, use_tqdm=False), strict=True):
            assert output.num_cached_tokens
            check(reference, name, output)
        assert llm.reset_prefix_cache()
        for name, output in zip(CHATS, llm.chat(list(CHATS.values()), GREEDY, use_tqdm=False), strict=True):
            check(reference, name, output)


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_smolvlm_folder(tmp_path_factory.mktemp("smolvlm"), takes_parts=False)


def answer_all(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.chat(list(CHATS.values()), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain_answers(smolvlm: Path) -> list[list[int]]:
    with LLM(str(smolvlm), num_blocks=400) as llm:
        return answer_all(llm, SEEDED)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 24, "enable_prefix_caching": False},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"core": "process", "kv_offload_gb": 0.01, "num_blocks": 28},
    ],
)
def test_texts_do_not_depend_on_the_settings(
    smolvlm: Path, plain_answers: list[list[int]], settings: dict[str, Any]
) -> None:
    """Preemption, drafts, and another process whose blocks come back from the host."""
    with LLM(str(smolvlm), max_model_len=320, **{"num_blocks": 400} | settings) as llm:
        assert answer_all(llm, SEEDED) == plain_answers
        assert answer_all(llm, SEEDED) == plain_answers


def test_an_image_in_ten_requests_is_encoded_once(smolvlm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = ImageEncoder.encode

    def count(encoder: ImageEncoder, pixels: np.ndarray, grid: list[int]) -> np.ndarray:
        encoded.append(len(pixels))
        return encode(encoder, pixels, grid)

    monkeypatch.setattr(ImageEncoder, "encode", count)
    chats = [ask(f"Question {number}: ", PICTURES["wide"]) for number in range(10)]
    with LLM(str(smolvlm), num_blocks=400) as llm:
        llm.chat(chats, GREEDY, use_tqdm=False)
        assert len(encoded) == 1
        llm.chat(chats[:2], GREEDY, use_tqdm=False, cache_salt="other tenant")
        assert len(encoded) == 2
    with LLM(str(smolvlm), num_blocks=400, mm_encoder_cache_gb=0) as llm:
        llm.chat(chats[:2], GREEDY, use_tqdm=False)
        assert len(encoded) == 4


def test_another_image_of_the_same_size_shares_no_block(smolvlm: Path) -> None:
    before = "The same text comes before both of the images. "
    with LLM(str(smolvlm), num_blocks=400) as llm:
        first, second, again = (
            llm.chat(ask(before, make_picture((90, 40), seed), "?"), GREEDY, use_tqdm=False)[0]
            for seed in (7, 8, 7)
        )
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    assert second.num_cached_tokens <= len(before) + 32 < again.num_cached_tokens
    assert first.outputs[0].token_ids == again.outputs[0].token_ids


def test_generate_takes_images_beside_a_prompt(smolvlm: Path) -> None:
    with LLM(str(smolvlm), num_blocks=400) as llm:
        (expected,) = llm.chat(CHATS["two"], GREEDY, use_tqdm=False)
        text = "<|im_start|>user:Compare <image> and <image>.</s>\nassistant:"
        pictures = [PICTURES["small"], to_bytes(PICTURES["tall"])]
        prompt = {"prompt": text, "multi_modal_data": {"image": pictures}}
        (found,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert found.prompt_token_ids == expected.prompt_token_ids
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        ids = {"prompt_token_ids": llm.tokenizer.encode(text), "multi_modal_data": {"image": pictures}}
        assert llm.generate(ids, GREEDY, use_tqdm=False)[0].prompt_token_ids == expected.prompt_token_ids
        for wrong, told in [
            ({"image": pictures[:1]}, "2 places for images, and there are 1"),
            ({"video": []}, "multi_modal_data must be"),
            ({"image": 5}, "must have an image"),
            ({"image": [b"x", b"x"]}, "must be a PNG, JPEG or WebP"),
            ({"image": [Image.new("RGB", (5000, 5000))] * 2}, "must have 1 to 16777216 pixels"),
        ]:
            with pytest.raises(InvalidRequest, match=told):
                llm.generate({"prompt": text, "multi_modal_data": wrong}, GREEDY, use_tqdm=False)


def test_a_model_without_eyes_says_so(tmp_path: Path) -> None:
    with LLM(max_model_len=256, num_blocks=64) as llm:
        with pytest.raises(InvalidRequest, match="this model does not see images"):
            llm.chat(CHATS["small"], GREEDY, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="this model does not see images"):
            llm.generate({"prompt": "x", "multi_modal_data": {"image": PICTURES["small"]}}, GREEDY, use_tqdm=False)


async def test_aborts_end_requests_whose_images_are_being_encoded(
    smolvlm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    encode = ImageEncoder.encode

    def wait(encoder: ImageEncoder, pixels: np.ndarray, grid: list[int]) -> np.ndarray:
        begun.set()
        may_end.wait(10)
        return encode(encoder, pixels, grid)

    monkeypatch.setattr(ImageEncoder, "encode", wait)
    async with Engine(EngineConfig(model=str(smolvlm), num_blocks=400)) as engine:

        async def run(name: str, chat: list[dict[str, Any]]) -> RequestOutput:
            stream = engine.generate(await engine.render_chat(chat), GREEDY, name)
            return [output async for output in stream][-1]

        aborted = asyncio.create_task(run("aborted", CHATS["small"]))
        await asyncio.to_thread(begun.wait, 10)
        waiting = asyncio.create_task(run("waiting", CHATS["tall"]))
        text = await run("text", CHATS["none"])
        assert text.finished and not waiting.done()  # a text waits for no image
        await engine.abort("aborted")
        assert (await aborted).outputs[0].finish_reason == "abort"
        may_end.set()
        assert (await waiting).outputs[0].finish_reason == "length"


async def test_images_that_are_too_large_for_one_message_are_refused_by_name(
    smolvlm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_PIXEL_BYTES", 5000)
    async with Engine(EngineConfig(model=str(smolvlm), mock_step_ms=0.0)) as engine:
        with pytest.raises(InvalidRequest, match=r"of 20 images have \d+ MiB of pixels; a request may have"):
            await engine.render_chat(ask(*[PICTURES["tall"]] * 20))


async def test_an_encoder_that_fails_ends_its_request_only(smolvlm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageEncoder, "encode", lambda *_: 1 / 0)
    async with Engine(EngineConfig(model=str(smolvlm), num_blocks=400)) as engine:
        prompt = await engine.render_chat(CHATS["small"])
        with pytest.raises(EngineError, match="an image could not be encoded"):
            _ = [output async for output in engine.generate(prompt, GREEDY)]
        prompt = await engine.render_chat(CHATS["none"])
        assert [output async for output in engine.generate(prompt, GREEDY)][-1].finished


def test_a_journal_replays_an_answer_about_an_image(smolvlm: Path, tmp_path: Path) -> None:
    seeded = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    with LLM(str(smolvlm), num_blocks=400, journal=str(tmp_path / "journal")) as llm:
        (expected,) = llm.chat(CHATS["two"], seeded, use_tqdm=False)
    (recorded,) = read_journal(str(tmp_path / "journal"))
    with LLM(str(smolvlm), num_blocks=400) as llm:
        (found,) = llm.generate(recorded.prompt, seeded, use_tqdm=False)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


async def test_the_encoder_ends_without_another_thread() -> None:
    """While Python ends, as after a script that closes no LLM, none can be started."""
    opener = Opener(None, object(), 0.0, print, print)  # type: ignore[arg-type]
    running = asyncio.create_task(opener.run())
    await asyncio.sleep(0)
    (ended := ThreadPoolExecutor(1)).shutdown()
    asyncio.get_running_loop().set_default_executor(ended)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
