"""Gaps between the tokens of 16 text streams: quiet, while 8 images of 8 megapixels arrive, and, for comparison, while
8 texts of as many tokens arrive; in turns.

python -m tests.engine.measure_images [max_num_batched_tokens]
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from engine import Engine, EngineConfig, SamplingParams
from tests.engine.vision_folders import make_picture, make_smolvlm_folder, to_bytes

NUM_STREAMS, NUM_IMAGES, NUM_TOKENS, NUM_TURNS = 16, 8, 600, 2
VISION = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 3}
VISION |= {"image_size": 512, "patch_size": 16}
TEXT = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 6}
TEXT |= {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096}


async def stream(engine: Engine, number: int, gaps: list[float]) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=number, ignore_eos=True, output_kind="delta")
    last = None
    async for _ in engine.generate(f"Text number {number}", params):
        now = time.perf_counter()
        if last is not None:
            gaps.append(now - last)
        last = now


async def look(engine: Engine, picture: bytes) -> int:
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]
    prompt = await engine.render_chat([{"role": "user", "content": parts}])
    async for _ in engine.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True)):
        pass
    return len(prompt)


async def read(engine: Engine, num_tokens: int, token_id: int) -> None:
    async for _ in engine.generate([token_id] * num_tokens, SamplingParams(max_tokens=8, ignore_eos=True)):
        pass


async def measure(folder: Path, num_tokens: int | None) -> None:
    pictures = [to_bytes(make_picture((3264, 2448), seed), "JPEG") for seed in range(NUM_IMAGES * NUM_TURNS + 1)]
    gaps: dict[str, list[float]] = {"quiet": [], "images": [], "texts": []}
    async with Engine(EngineConfig(model=str(folder), num_blocks=2048, max_num_batched_tokens=num_tokens)) as engine:
        length = await look(engine, pictures[-1])
        for turn in range(NUM_TURNS):
            for name, found in gaps.items():
                streams = [stream(engine, number, found) for number in range(NUM_STREAMS)]
                shown = pictures[turn * NUM_IMAGES : (turn + 1) * NUM_IMAGES]
                running = asyncio.gather(*streams)
                if name == "images":
                    await asyncio.gather(*(look(engine, each) for each in shown))
                elif name == "texts":
                    await asyncio.gather(*(read(engine, length, 2 + turn * 8 + at) for at in range(NUM_IMAGES)))
                await running
    p99 = {name: float(np.percentile(found, 99)) for name, found in gaps.items()}
    median = {name: float(np.median(found)) for name, found in gaps.items()}
    for name in gaps:
        ratios = (f"{p99[name] / p99['quiet']:.2f} of quiet, median {median[name] / median['quiet']:.2f} of quiet")
        print(f"{name}: p99 of the gaps {p99[name] * 1e3:.1f} ms, {ratios}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        made = make_smolvlm_folder(Path(name), vision=VISION, text=TEXT, tile=512, scale=4)
        asyncio.run(measure(made, int(sys.argv[1]) if sys.argv[1:] else None))
