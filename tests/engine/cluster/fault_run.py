"""Streams over HTTP while replicas end: `python -m tests.engine.cluster.fault_run --fault sigkill`.

Every text must equal that of an undisturbed run with one core. The sizes of record are the defaults: 200 streams, four
replicas of the demo model, 20 faults.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from app.config import AppConfig
from engine import Engine, EngineConfig
from engine.cluster.connection import LinkConnection
from tests.app.api.harness import Server, events, run_server
from tests.engine.mixed_requests import SCHEMA
from tests.waiting import wait_until

SETTINGS: dict[str, Any] = {
    "num_blocks": 1024, "max_num_waiting": 1000, "num_threads": 1, "heartbeat_timeout_s": 2.0
}  # fmt: skip
PROPERTIES = {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 99}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city", "days"]}
TOOL = {
    "type": "function",
    "function": {"name": "forecast", "parameters": PARAMETERS | {"additionalProperties": False}},
}
JSON_SCHEMA = {"name": "record", "schema": SCHEMA, "strict": True}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAMESPACE = "troupe-core"  # of the replica of rank 0: troupe-core0, with a device of the same name
NO_TIMEOUT = aiohttp.ClientTimeout(None)
Fault = Callable[[Engine, int], Awaitable[None]]
Text = dict[int, tuple[str, list[float], str | None]]  # by index of the choice: text, logprobs, finish reason


def make_bodies(num_streams: int, length: int) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies: schemas, tools, n = 2, penalties, stop strings, logprobs; all at temperature 1."""
    bodies = []
    for number in range(num_streams):
        question = f"What is said of number {number}, the weather and the price of {number % 7} pens?"
        chat = {"messages": [{"role": "user", "content": question}]}
        path, fields = [
            (CHAT, chat | {"response_format": {"type": "json_schema", "json_schema": JSON_SCHEMA}}),
            (CHAT, chat | {"tools": [TOOL], "tool_choice": "required"}),
            (COMPLETIONS, {"prompt": question, "n": 2, "logprobs": 1}),
            (COMPLETIONS, {"prompt": question, "presence_penalty": 0.5, "repetition_penalty": 1.3, "stop": ["qu"]}),
            (COMPLETIONS, {"prompt": question, "structured_outputs": {"regex": "[a-f]{3}(-[0-9]{2,9}){4,9}"}, "n": 2}),
            (CHAT, chat | {"frequency_penalty": 0.4, "logprobs": True}),
        ][number % 6]  # fmt: skip
        fields |= {"seed": number, "temperature": 1, "max_tokens": length * (60 + number % 90)}
        bodies.append((path, fields | {"ignore_eos": length > 1}))
    return bodies


async def read_stream(server: Server, path: str, body: dict[str, Any]) -> Text:
    """Add up the events of one stream."""
    texts: dict[int, list[str]] = {}
    logprobs: dict[int, list[float]] = {}
    reasons: dict[int, str | None] = {}
    async with server.client.post(server.url + path, json=body | {"stream": True}, timeout=NO_TIMEOUT) as response:
        raw = await response.read()
    for event in events(raw):
        assert "error" not in event, event
        for choice in event["choices"]:
            delta = choice.get("delta") or choice
            parts = [delta.get("text") or delta.get("content") or ""]
            parts += [json.dumps(call["function"]) for call in delta.get("tool_calls") or []]
            texts.setdefault(choice["index"], []).append("".join(parts))
            found = choice.get("logprobs") or {}
            values = found.get("token_logprobs") or [each["logprob"] for each in found.get("content") or []]
            logprobs.setdefault(choice["index"], []).extend(round(value, 4) for value in values)
            if choice.get("finish_reason") is not None:
                assert choice["index"] not in reasons, "a completion ended twice"
                reasons[choice["index"]] = choice["finish_reason"]
    return {index: (join(parts), logprobs[index], reasons[index]) for index, parts in texts.items()}


def join(parts: list[str]) -> str:
    """Return the text of the parts; pieces of tool calls are added up by field, wherever they were cut."""
    if not any(part.startswith("{") and '"arguments"' in part for part in parts):
        return "".join(parts)
    calls = [json.loads(part) for part in parts if part]
    return "".join((call.get("name") or "") + (call.get("arguments") or "") for call in calls)


async def run_all(server: Server, bodies: list[tuple[str, dict[str, Any]]]) -> list[Text]:
    return await asyncio.gather(*(read_stream(server, path, body) for path, body in bodies))


def find_pid(engine: Engine, index: int) -> int:
    """Return the process of a replica on this machine."""
    connection = engine.replicas[index].connection
    assert isinstance(connection, LinkConnection) and connection.process is not None
    return connection.process.pid


def send_signal(engine: Engine, index: int, number: int) -> None:
    os.kill(find_pid(engine, index), number)


async def kill(engine: Engine, index: int) -> None:
    send_signal(engine, index, signal.SIGKILL)


async def stop(engine: Engine, index: int) -> None:
    send_signal(engine, index, signal.SIGSTOP)


async def cut(engine: Engine, index: int) -> None:
    engine.replicas[index].restart()


async def unplug(engine: Engine, index: int) -> None:
    """Take the network from a replica in a namespace until the front has noticed."""
    ip = ("ip", "-n", f"{NAMESPACE}{index}", "link", "set", f"{NAMESPACE}{index}")
    await (await asyncio.create_subprocess_exec(*ip, "down")).wait()
    await wait_until(lambda: engine.describe_replicas()[index].state != "ready")
    await (await asyncio.create_subprocess_exec(*ip, "up")).wait()


async def restart(engine: Engine, index: int) -> None:
    await wait_until(lambda: sum(each.state == "ready" for each in engine.describe_replicas()) > 1, 300)
    await engine.restart_replica(index)


FAULTS: dict[str, Fault] = {"sigkill": kill, "sigstop": stop, "tcp": cut, "restart": restart, "link": unplug}


async def disturb(engine: Engine, fault: Fault, times: list[int], chance: random.Random, victims: list[int]) -> None:
    """Cause a fault in a replica that has requests whenever so many tokens were generated."""
    for num_tokens in times:
        await wait_until(lambda n=num_tokens: engine.stats().generation_tokens >= n, 600)
        await wait_until(lambda: bool(find_busy(engine)), 600)
        victims.append(chance.choice(find_busy(engine)))
        await fault(engine, victims[-1])


def find_busy(engine: Engine) -> list[int]:
    return [each.index for each in engine.describe_replicas() if each.state == "ready" and each.num_requests]


async def compare(
    config: EngineConfig, bodies: list[Any], fault: Fault, num_faults: int, seed: int
) -> dict[str, Any]:
    """Run the streams undisturbed on one core, then with faults. Returns what happened."""
    async with (
        Engine(EngineConfig(model=config.model, **SETTINGS)) as engine,
        run_server(engine, AppConfig()) as server,
    ):
        expected = await run_all(server, bodies)
        total = engine.stats().generation_tokens
    chance = random.Random(seed)
    times = sorted(chance.randrange(total // 20, total * 4 // 5) for _ in range(num_faults))
    victims: list[int] = []
    start = time.monotonic()
    async with start_engine(config) as engine, run_server(engine, AppConfig()) as server:
        answers = asyncio.ensure_future(run_all(server, bodies))
        caused = asyncio.ensure_future(disturb(engine, fault, times, chance, victims))
        found = await answers
        caused.cancel()
        stats = engine.stats()
    return {
        "streams": len(bodies), "equal": sum(one == other for one, other in zip(found, expected, strict=True)),
        "faults": len(victims), "tokens": (total, stats.generation_tokens), "resumed": stats.num_resumed,
        "inexact": stats.num_resumed_inexact,
        "ended": (sum(stats.finished.values()), sum(len(each) for each in expected)),
        "seconds": round(time.monotonic() - start),
    }


@asynccontextmanager
async def start_engine(config: EngineConfig) -> AsyncIterator[Engine]:
    """An engine, with headless processes for the replicas that connect by TCP."""
    engine = Engine(config)
    starting = asyncio.ensure_future(engine.start())
    listener = engine.listener
    processes = []
    if listener is not None:
        await wait_until(lambda: listener.port != 0)
        for rank in range(config.data_parallel_size):
            flags = {
                "data-parallel-size": config.data_parallel_size, "data-parallel-rank": rank,
                "data-parallel-address": config.data_parallel_address, "data-parallel-rpc-port": listener.port,
                "model": config.model,
            }
            flags |= {name.replace("_", "-"): value for name, value in SETTINGS.items()}
            command = [f"--{name}={value}" for name, value in flags.items()]
            place = []
            if config.data_parallel_address != "127.0.0.1":
                place = ["ip", "netns", "exec", f"{NAMESPACE}{rank}"]
            environment = os.environ | {"TROUPE_DATA_PARALLEL_KEY": config.data_parallel_key or ""}
            processes.append(
                await asyncio.create_subprocess_exec(
                    *(*place, sys.executable, "-m", "app", "serve", "--headless", *command), env=environment
                )
            )
    try:
        await starting
        yield engine
    finally:
        await engine.close()
        for process in processes:
            process.terminate()
            await process.wait()


def make_demo_config(num_replicas: int, fault: str, address: str) -> EngineConfig:
    remote: dict[str, Any] = {}
    if fault in ("tcp", "link"):
        remote = {
            "data_parallel_address": address, "data_parallel_size_local": 0, "data_parallel_key": secrets.token_hex(),
            "data_parallel_rpc_port": 0,
        }
    return EngineConfig(data_parallel_size=num_replicas, **remote, **SETTINGS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=FAULTS, default="sigkill")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--address", default="127.0.0.1", help="of the front; otherwise replicas are in namespaces")
    parser.add_argument("--length", type=int, default=1, help="factor of max_tokens")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    config = make_demo_config(given.replicas, given.fault, given.address)
    found = asyncio.run(
        compare(config, make_bodies(given.streams, given.length), FAULTS[given.fault], given.faults, given.seed)
    )
    print(json.dumps({"fault": given.fault} | found))
    return 0 if found["equal"] == given.streams and found["ended"][0] == found["ended"][1] else 1


if __name__ == "__main__":
    sys.exit(main())
