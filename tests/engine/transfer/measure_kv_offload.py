"""By hand: KV offload against none, in one process, in turn, on random weights of a shape of `app.bench.shapes`.

python -m tests.engine.transfer.measure_kv_offload chats      24 users x 4 turns x 800 tokens, a cache for a third
python -m tests.engine.transfer.measure_kv_offload plain      throughput on prompts that share nothing
python -m tests.engine.transfer.measure_kv_offload transfer   time to first token with blocks of another engine
"""

import argparse
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from app.bench.shapes import write_shape
from engine import LLM, SamplingParams

TURN_TOKENS, ANSWER_TOKENS = 800, 32


def make_llm(arguments: argparse.Namespace, folder: Path, num_blocks: int, **more: Any) -> LLM:
    return LLM(
        str(write_shape(arguments.shape, folder)), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
        attention_backend="native", num_threads=1, num_blocks=num_blocks, max_model_len=4096,
        max_num_seqs=4, max_num_batched_tokens=512, **more,
    )  # fmt: skip


def make_tokens(seed: str, count: int) -> list[int]:
    chance = Random(seed)
    return [chance.randrange(5, 40_000) for _ in range(count)]


def generate(
    llm: LLM, prompts: list[list[int]], max_tokens: int, saves_blocks: bool = False
) -> tuple[list[list[int]], float]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, saves_blocks=saves_blocks)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], time.perf_counter() - start


def run_chats(llm: LLM, num_users: int, num_turns: int) -> tuple[int, list[list[int]]]:
    """Return the number of prompt tokens computed, and the last answers."""
    chats: list[list[int]] = [[] for _ in range(num_users)]
    answers: list[list[int]] = []
    num_prompt = 0
    for turn in range(num_turns):
        for user, chat in enumerate(chats):
            chat += make_tokens(f"{user} {turn}", TURN_TOKENS - ANSWER_TOKENS)
        num_prompt += sum(map(len, chats))
        answers, _ = generate(llm, chats, ANSWER_TOKENS)
        for chat, answer in zip(chats, answers, strict=True):
            chat += answer
    return num_prompt - llm.stats().prefix_cache_hits, answers


def measure_chats(arguments: argparse.Namespace, folder: Path) -> None:
    users, turns = arguments.users, arguments.turns
    num_blocks = users * turns * TURN_TOKENS // 16 // 3
    found = []
    for size in (0.0, arguments.gb):
        with make_llm(arguments, folder, num_blocks, kv_offload_gb=size) as llm:
            found.append(run_chats(llm, users, turns))
            print(f"kv_offload_gb={size}: {found[-1][0]} prompt tokens computed", flush=True)
    assert found[0][1] == found[1][1], "offload changed an answer"
    print(f"computed with offload over without: {found[1][0] / found[0][0]:.3f}; all answers equal")


def measure_plain(arguments: argparse.Namespace, folder: Path) -> None:
    """Each engine gets new prompts in every round; both have a cache for one third of a round."""
    ratios = []
    num_blocks = arguments.users * TURN_TOKENS // 16 // 3
    with (
        make_llm(arguments, folder, num_blocks) as without,
        make_llm(arguments, folder, num_blocks, kv_offload_gb=arguments.gb) as offload,
    ):
        for number in range(arguments.rounds + 1):
            prompts = [make_tokens(f"{number} {user}", TURN_TOKENS) for user in range(arguments.users)]
            pair = [without, offload] if number % 2 else [offload, without]
            seconds = {id(llm): generate(llm, prompts, ANSWER_TOKENS)[1] for llm in pair}
            if number:  # the first round warms up
                ratios.append(seconds[id(without)] / seconds[id(offload)])
                print(f"round {number}: throughput with offload over without {ratios[-1]:.3f}", flush=True)
    print(f"median {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def measure_transfer(arguments: argparse.Namespace, folder: Path) -> None:
    """One token of each chat in an engine that finds its blocks in a store, and in one that computes them."""
    num_blocks = arguments.users * TURN_TOKENS // 16 + 100
    for kind in ("FileConnector", "FileConnector in /dev/shm", "TcpConnector"):
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm" if "shm" in kind else folder) as shared,
            socket.create_server(("127.0.0.1", 0)) as free,
        ):
            store: dict[str, Any] = {"kv_connector": kind.split()[0], "kv_buffer_size": 2**29}
            store["kv_port"] = free.getsockname()[1]
            free.close()
            if "File" in kind:
                store["kv_connector_extra_config"] = {"shared_storage_path": shared}
            secret, ratios = "a secret of the replicas", []
            with ExitStack() as stack:
                producer, consumer = (
                    stack.enter_context(
                        make_llm(
                            arguments, folder, num_blocks, data_parallel_key=secret, kv_offload_gb=0.5,
                            kv_transfer_config=store | {"kv_role": role},
                        )
                    )
                    for role in ("kv_producer", "kv_consumer")
                )  # fmt: skip
                for user in range(arguments.users):
                    known, new = (make_tokens(f"{kind} {user} {each}", TURN_TOKENS) for each in range(2))
                    generate(producer, [known], 1, saves_blocks=True)
                    warm, cold = (generate(consumer, [prompt], 1)[1] for prompt in (known, new))
                    ratios.append(warm / cold)
                assert consumer.stats().kv_received_tokens == arguments.users * (TURN_TOKENS - 16)
        del ratios[0]  # it warms up
        print(f"{kind}: TTFT over cold {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["chats", "plain", "transfer"])
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gb", type=float, default=2.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure = {"chats": measure_chats, "plain": measure_plain, "transfer": measure_transfer}
        measure[arguments.what](arguments, Path(folder))


if __name__ == "__main__":
    main()
