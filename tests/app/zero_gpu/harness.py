"""Starts the Space of `space.py`, asks it, and computes the same texts undisturbed."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from engine import Engine, EngineConfig, SamplingParams
from tests.app.zero_gpu.space import TOKEN_HEADER, make_token
from tests.waiting import wait_until

FLAGS = (
    *("--chat-model", "none", "--extract-model", "none", "--data-dir", "none"),
    *("--no-enable-native-ops", "--num-blocks", "256", "--shutdown-grace-s", "0"),
)


class Space:
    """A running Space."""

    def __init__(self, url: str, lines: list[str]) -> None:
        self.url = url
        self.lines = lines  # of its stdout

    def list_events(self, name: str) -> list[str]:
        """What the device API has noted, such as the visitors whose leases it has scheduled."""
        return [line.split()[2] for line in self.lines if line.startswith(f"device {name} ")]

    def kill_core(self) -> None:
        """Kill the process that has the device, at whatever step it is."""
        os.kill(int(self.list_events("allowed")[-1]), signal.SIGKILL)

    async def count_tokens(self) -> int:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as reply:
            found = re.search(r"^troupe:generation_tokens_total\S* (\S+)", await reply.text(), re.MULTILINE)
        assert found is not None
        return int(float(found[1]))

    async def complete(self, number: int, length: int, token: str | None) -> tuple[int, Any]:
        headers = {} if token is None else {TOKEN_HEADER: token}
        body = make_body(number, length) | {"model": "demo_model"}
        timeout = aiohttp.ClientTimeout(None)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{self.url}/v1/completions", json=body, headers=headers) as reply,
        ):
            return reply.status, await reply.json()

    async def write(self, number: int, length: int, visitor: str) -> str:
        status, reply = await self.complete(number, length, make_token(visitor))
        assert status == 200, reply
        text: str = reply["choices"][0]["text"]
        return text


@asynccontextmanager
async def run_space(lease_s: int, *flags: str) -> AsyncIterator[Space]:
    """A Space whose calls may last so many seconds; it ends with the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.app.zero_gpu.space", str(lease_s), "--port", "0", *FLAGS, *flags,
        stdout=asyncio.subprocess.PIPE,
    )
    lines: list[str] = []

    async def read() -> None:
        assert process.stdout is not None, "it is a pipe"
        async for line in process.stdout:
            lines.append(line.decode())

    reading = asyncio.create_task(read())
    try:
        await wait_until(lambda: reading.done() or any("ready at" in line for line in lines), 120.0)
        found = re.search(r"http://\S+", "".join(lines))
        assert found is not None, lines
        yield Space(found[0], lines)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await reading


def make_body(number: int, length: int) -> dict[str, Any]:
    """A request by number; it draws its tokens and does not end early."""
    fields = {"seed": number, "temperature": 1.0, "top_p": 1.0, "max_tokens": length, "ignore_eos": True}
    return {"prompt": f"What is said of number {number}?"} | fields


async def write_alone(numbers: Sequence[int], length: int) -> list[str]:
    """The texts of an engine in this process that nothing disturbs."""
    async with Engine(EngineConfig(device="cpu", enable_native_ops=False, num_blocks=256)) as engine:

        async def write(number: int) -> str:
            fields = make_body(number, length)
            prompt, text = fields.pop("prompt"), ""
            async for output in engine.generate(prompt, SamplingParams(**fields)):
                text = output.outputs[0].text
            return text

        return await asyncio.gather(*map(write, numbers))
