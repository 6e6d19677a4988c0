"""Gaps between the tokens of 16 text streams, quiet and while 8 images of 8 megapixels arrive, in turns.

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

NUM_STREAMS, NUM_IMAGES, NUM_TOKENS, NUM_TURNS = 16, 8, 300, 2
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


async def look(engine: Engine, picture: bytes) -> None:
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]
    prompt = await engine.render_chat([{"role": "user", "content": parts}])
    async for _ in engine.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True)):
        pass


async def measure(folder: Path, num_tokens: int | None) -> None:
    pictures = [to_bytes(make_picture((3264, 2448), seed), "JPEG") for seed in range(NUM_IMAGES * NUM_TURNS)]
    gaps: dict[str, list[float]] = {"quiet": [], "images": []}
    async with Engine(
        EngineConfig(model=str(folder), num_blocks=2048, max_num_batched_tokens=num_tokens)
    ) as engine:
        await look(engine, to_bytes(make_picture((64, 64), 99)))
        for turn in range(NUM_TURNS):
            for name, found in gaps.items():
                streams = [stream(engine, number, found) for number in range(NUM_STREAMS)]
                shown = pictures[turn * NUM_IMAGES : (turn + 1) * NUM_IMAGES] if name == "images" else []
                running = asyncio.gather(*streams)
                looking = asyncio.gather(*(look(engine, each) for each in shown))
                await running
                await looking
    p99 = {name: float(np.percentile(found, 99)) for name, found in gaps.items()}
    median = {name: float(np.median(found)) for name, found in gaps.items()}
    print(f"p99 of the gaps: quiet {p99['quiet'] * 1e3:.1f} ms, with images {p99['images'] * 1e3:.1f} ms")
    print(
        f"ratio of p99 {p99['images'] / p99['quiet']:.2f}, of medians {median['images'] / median['quiet']:.2f}"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        made = make_smolvlm_folder(Path(name), vision=VISION, text=TEXT, tile=512, scale=4)
        asyncio.run(measure(made, int(sys.argv[1]) if sys.argv[1:] else None))
