"""Seconds from nothing to the first token, and the memory of a loaded model, beside llama.cpp on the same GGUF file.

    .venv/bin/python -m tests.measure.loading PATH... [--quantization int4] [--rounds 3] [--max-model-len 1024]

Each start is a process of its own; its imports are not counted. Prints a line of JSON for each path: the medians of
starts without a packed copy ("first") and with one ("second"), of the clock and of all threads' processor time, the
resident memory after the first token and the largest before it, in MB, and the size of the weights' files. llama.cpp
is left out where it is not installed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine import LLM, SamplingParams
from tests.measure.llama_cpp import library as llama_cpp

PROMPT = [(7919 * place) % 3000 + 100 for place in range(1, 33)]


def run_ours(path: str, quantization: str, max_model_len: int) -> dict[str, float]:
    """Return the seconds until Troupe has written one token, and its memory then."""
    start, processor = time.perf_counter(), time.process_time()
    is_bare = not path.endswith(".gguf") and not (Path(path) / "tokenizer.json").exists()
    llm = LLM(
        model=path, device="cpu", max_model_len=max_model_len, quantization=quantization, num_blocks=80,
        skip_tokenizer_init=is_bare,
    )  # fmt: skip
    llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(max_tokens=1, temperature=0.0))
    found = {"seconds": time.perf_counter() - start, "processor": time.process_time() - processor, **read_memory()}
    llm.close()
    return found


def run_peer(path: str, max_model_len: int) -> dict[str, float]:
    """Return the seconds until llama.cpp has computed the first token's logits, and its memory then."""
    library = llama_cpp.load_library()
    start, processor = time.perf_counter(), time.process_time()
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    params = library.llama_context_default_params()
    params.num_tokens, params.num_threads, params.num_prompt_threads = max_model_len, 2, 2
    context = library.llama_init_from_model(model, params)
    batch = library.llama_batch_init(len(PROMPT), 0, 1)
    batch.num_tokens = len(PROMPT)
    for place, token in enumerate(PROMPT):
        batch.token[place], batch.position[place], batch.num_sequences[place] = token, place, 1
        batch.sequence[place][0], batch.has_logits[place] = 0, place == len(PROMPT) - 1
    assert library.llama_decode(context, batch) == 0
    assert library.llama_get_logits(context)[0] is not None
    return {"seconds": time.perf_counter() - start, "processor": time.process_time() - processor, **read_memory()}


def read_memory() -> dict[str, int]:
    """Return resident and largest resident memory in MB."""
    lines = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    table = {name: int(value.split()[0]) >> 10 for name, value in lines if name in ("VmRSS", "VmHWM")}
    return {"resident": table["VmRSS"], "peak": table["VmHWM"]}


def measure(kind: str, arguments: argparse.Namespace, path: str, cache: str) -> dict[str, float]:
    """Run one start in a process of its own."""
    command = [sys.executable, "-m", "tests.measure.loading", "--child", kind, path]
    command += ["--quantization", arguments.quantization, "--max-model-len", str(arguments.max_model_len)]
    kernels = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "troupe" / "kernels"
    (Path(cache) / "troupe").mkdir(exist_ok=True)
    if not (Path(cache) / "troupe" / "kernels").exists():
        (Path(cache) / "troupe" / "kernels").symlink_to(kernels)
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def compare(arguments: argparse.Namespace, path: str) -> dict[str, object]:
    """Return the medians of one path."""
    files = [path] if path.endswith(".gguf") else [str(each) for each in Path(path).glob("*.safetensors")]
    has_peer = path.endswith(".gguf") and llama_cpp.LIBRARY.exists()
    starts: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for name, kind in (("first", "ours"), ("second", "ours"), *([("llama.cpp", "peer")] * has_peer)):
                starts.setdefault(name, []).append(measure(kind, arguments, path, cache))
    medians = {
        name: {key: round(statistics.median(each[key] for each in found), 2) for key in found[0]}
        for name, found in starts.items()
    }
    return {"path": path, "file": sum(os.path.getsize(each) for each in files) >> 20, **medians}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--child", choices=("ours", "peer"))
    given = parser.parse_args()
    if given.child:
        (path,) = given.paths
        before = read_memory()["resident"]
        if given.child == "ours":
            found = run_ours(path, given.quantization, given.max_model_len)
        else:
            found = run_peer(path, given.max_model_len)
        print(json.dumps({**found, "imports": before}))
    else:
        for path in given.paths:
            print(json.dumps(compare(given, path)), flush=True)
