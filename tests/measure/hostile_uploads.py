"""The longest gap of chat streams beside hostile uploads, over that of a quiet server.

    .venv/bin/python -m tests.measure.hostile_uploads [--rounds 5] [--seconds 5]

Eight streams of the demo model run all the time; in every other window six clients upload one hostile file each. Prints
the longest gap of each window, and the ratio of the medians, which should be at most 1.5.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time

import aiohttp

from tests.app.extraction.pdf_files import draw, make_pdf

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}})
KEYS = json.dumps({f"k{n}": n for n in range(20_000)})
# name -> the parts of a form: a text, or a file with its name
UPLOADS: dict[str, dict[str, str | tuple[str, bytes]]] = {
    "keys": {"file": ("a.jsonl", f'{KEYS[:-1]}, "k0": 1}}'.encode())},
    "blank lines": {"file": ("a.jsonl", b"\n" * 8_000_000 + b"[")},
    "deep": {"rows": "[" * 1_000_000},
    "values": {"rows": "[" + "[]," * 99_000 + "1]"},
    "quotes": {"file": ("a.csv", b'a,b;c\n"x","y"\n' + b'"a' * 500_000)},
    "pdf": {
        "file": ("a.pdf", make_pdf(draw(*(("words " * 400, 0, 12 * row) for row in range(1000))))
                 .replace(b"600 800", b"14400 14400")),
    },
}  # fmt: skip


async def stream(client: aiohttp.ClientSession, base: str, arrivals: list[tuple[float, float]]) -> None:
    """Read one chat after the other; note when each piece comes, and after how long."""
    body = {"messages": [{"role": "user", "content": "Once upon a time"}], "stream": True, "max_tokens": 400,
            "ignore_eos": True}  # fmt: skip
    while True:
        async with client.post(f"{base}/v1/chat/completions", json=body) as reply:
            last = None
            async for _ in reply.content:
                now = time.monotonic()
                if last is not None:
                    arrivals.append((now, now - last))
                last = now


async def upload(client: aiohttp.ClientSession, base: str, parts: dict[str, str | tuple[str, bytes]]) -> None:
    """Send one upload; the answer does not matter."""
    form = aiohttp.FormData({"schema": SCHEMA}, default_to_multipart=True)
    for name, value in parts.items():
        if isinstance(value, str):
            form.add_field(name, value)
        else:
            form.add_field(name, value[1], filename=value[0])
    async with client.post(f"{base}/v1/extract", data=form) as reply:
        await reply.read()


async def measure(base: str, rounds: int, seconds: float) -> float:
    """Return the ratio of the longest gaps."""
    found: dict[str, list[float]] = {"quiet": [], "hostile": []}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        arrivals: list[tuple[float, float]] = []
        streams = [asyncio.create_task(stream(client, base, arrivals)) for _ in range(8)]
        await asyncio.sleep(3)
        for number in range(2 * rounds):
            kind = "hostile" if number % 2 else "quiet"
            sent = UPLOADS.values() if kind == "hostile" else ()
            uploads = [asyncio.create_task(upload(client, base, parts)) for parts in sent]
            begun = time.monotonic()
            await asyncio.sleep(seconds)
            ended = time.monotonic()
            gaps = [gap for at, gap in arrivals if begun < at < ended]
            found[kind].append(max(gaps))
            print(f"{kind:8} longest {1000 * max(gaps):6.0f} ms, {len(gaps):6} pieces", flush=True)
            await asyncio.gather(*uploads)
        for task in streams:
            task.cancel()
    ratio = statistics.median(found["hostile"]) / statistics.median(found["quiet"])
    print(f"hostile over quiet: {ratio:.2f}")
    return ratio


async def main() -> None:
    """Start a server, measure, and end it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "app", "--no-ui", "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        base = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as client:
            while server.poll() is None:
                try:
                    async with client.get(f"{base}/readyz") as reply:
                        if reply.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.2)
        await measure(base, options.rounds, options.seconds)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    asyncio.run(main())
