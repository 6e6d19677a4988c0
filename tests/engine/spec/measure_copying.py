"""Measures n-gram drafts on copied text against llama.cpp without drafts.

`python -m tests.engine.spec.measure_copying [--edit-every 40]`: the prompt is a text of 600 tokens, and the answer
repeats it with edits. Random weights do not copy. So the output matrix of a random model is set so that each token of
the answer predicts the next one. Both engines then write the answer, and all else is real: the weights that are read,
the n-gram drafts from the prompt, their verification. No token occurs twice, and the output matrix is not tied.
"""

import argparse
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from app.bench.latency import measure
from app.bench.runners import TroupeRunner
from app.bench.shapes import SHAPES, write_shape
from app.bench.spread import ratio
from app.bench.workload import Job
from engine import EngineConfig, SamplingParams
from tests.measure.llama_cpp.runner import LlamaCppRunner

NUM_TOKENS = 600


def edit(text: list[int], every: int, fresh: list[int]) -> list[int]:
    """Return the text with one edit in every so many tokens: a token is replaced, dropped or inserted in turn."""
    answer: list[int] = []
    for place, token_id in enumerate(text, 1):
        kind = place // every % 3 if place % every == 0 else None
        answer += [[fresh.pop()], [], [token_id, fresh.pop()]][kind] if kind is not None else [token_id]
    return answer


def write_model(shape: str, chain: list[int], folder: Path) -> Path:
    """Write a checkpoint of a shape that continues each token of the chain with the next one."""
    config = AutoConfig.from_pretrained(write_shape(shape, folder), tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        # The layers' contribution to a token's embedding stays smaller than the embedding.
        embedding.mul_(50)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
        head[chain[1:]] = 0.05 * embedding[chain[:-1]]
    model.save_pretrained(folder / "model")
    return folder / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--edit-every", type=int, default=40, help="tokens of the text per edit (40)")
    parser.add_argument("--num-speculative-tokens", type=int, default=8, help="most drafts of a step (8)")
    parser.add_argument("--num-iters", type=int, default=3, help="rounds (3)")
    parser.add_argument("--num-threads", type=int, default=2)
    args = parser.parse_args()
    ids = Random(0).sample(range(1000, 49_000), 2 * NUM_TOKENS)
    text, question = ids[:NUM_TOKENS], ids[NUM_TOKENS : NUM_TOKENS + 16]
    prompt, answer = text + question, edit(text, args.edit_every, ids[NUM_TOKENS + 16 :])
    spec = {"method": "ngram", "prompt_lookup_min": 2, "num_speculative_tokens": args.num_speculative_tokens}
    with TemporaryDirectory(prefix="troupe-copying-") as name:
        model = str(write_model(args.shape, [prompt[-1], *answer], Path(name)))
        settings = {
            "model": model, "dtype": "bfloat16", "num_threads": args.num_threads, "max_model_len": 2048,
            "num_blocks": 160, "skip_tokenizer_init": True, "attention_backend": "native",
            "enable_prefix_caching": False,
        }  # fmt: skip
        peer = LlamaCppRunner(EngineConfig(model=model, dtype="bfloat16"), args.num_threads)
        drafting = TroupeRunner(settings | {"speculative_config": spec})
    params = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
    found = drafting.llm.generate([prompt], params, use_tqdm=False)[0]
    assert found.outputs[0].token_ids == answer, "the model must write the answer"
    assert peer.generate(np.array([prompt]), len(answer))[0].tolist() == answer, "llama.cpp must write it too"
    print("drafted and accepted:", found.metrics.drafts, "of", len(answer), "tokens")
    cells = measure([peer, drafting], [Job(prompt, len(answer))], args.num_iters, 0)
    for cell in cells:
        over = ratio(cell.decode_rate, cells[0].decode_rate)
        whole = ratio(cells[0].latency_s, cell.latency_s)
        print(f"{cell.name}: decode {cell.decode_rate!s} tok/s, over llama.cpp {over!s}; with the prompt {whole!s}")
    peer.close()
    drafting.close()


if __name__ == "__main__":
    main()
