"""kill -9 of a server during 40 chats of the page, a batch of 500 rows and a chain of responses; then what is left.

    python -m tests.measure.kill_server [--chats 40] [--rows 500]

It prints how old the last writing of each answer was at the kill, the longest first, and exits 1 if anything is lost:
a question, an answer's text older than about a second, a row, or a link of the chain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

READY = "Troupe is ready at "
MAX_LOST_S = 1.5  # a second between two writings, and the step that a busy engine takes
LONG = {"temperature": 0, "max_tokens": 2000}


class Server:
    """A server in a process of its own, on a data folder."""

    def __init__(self, folder: Path) -> None:
        self.command = [
            sys.executable, "-m", "app", "--port", "0", "--data-dir", str(folder), "--mock-step-ms", "40",
            "--max-num-seqs", "64",
        ]  # fmt: skip

    async def __aenter__(self) -> Server:
        self.process = await asyncio.create_subprocess_exec(
            *self.command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        while not (line := (await self.process.stdout.readline()).decode()).startswith(READY):
            assert line, "the server ended before it was ready"
        self.url = line.removeprefix(READY).split()[0]
        return self

    async def kill(self) -> float:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()
        return time.time()

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()


class Page:
    """A browser with a cookie, and the two events of the chat that begin a turn and open the page."""

    def __init__(self, client: aiohttp.ClientSession, number: int) -> None:
        self.client, self.number = client, number

    async def open(self, url: str) -> None:
        async with self.client.get(url, headers={"accept": "text/html"}) as reply:
            assert reply.status == 200
        async with self.client.get(f"{url}/config") as reply:
            self.config = await reply.json()
        self.url, self.ids = url, {each["props"].get("elem_id"): each["id"] for each in self.config["components"]}
        self.values = {each["id"]: each["props"].get("value") for each in self.config["components"]}

    async def run(self, holder: str, **given: Any) -> Any:
        """Run the event that has this component as its first or last input, with some inputs by their elem_id."""
        events = self.config["dependencies"]
        found = next(each for each in events if self.ids[holder] in (each["inputs"][:1] + each["inputs"][-1:]))
        values = {**self.values, **{self.ids[name]: value for name, value in given.items()}}
        data = [values[each] for each in found["inputs"]]
        body = {"fn_index": found["id"], "data": data, "session_hash": f"s{self.number}"}
        async with self.client.post(f"{self.url}/gradio_api/run/predict", json=body) as reply:
            assert reply.status == 200, await reply.text()
            return (await reply.json())["data"]

    async def ask(self) -> None:
        await self.run("composer", composer={"text": f"Question {self.number}", "files": []})

    async def restore(self) -> Any:
        return (await self.run("kept-chat", **{"kept-chat": None}))[0]


async def post(client: aiohttp.ClientSession, url: str, body: Any) -> Any:
    async with client.post(url, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def begin_batch(client: aiohttp.ClientSession, url: str, num_rows: int) -> str:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}
    row = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    rows = [{"custom_id": str(number), **row} for number in range(num_rows)]
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(map(json.dumps, rows)), filename="in.jsonl")
    async with client.post(f"{url}/v1/files", data=form) as reply:
        file = (await reply.json())["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str((await post(client, f"{url}/v1/batches", asked))["id"])


async def measure(folder: Path, num_chats: int, num_rows: int) -> list[str]:
    """Return what was lost."""
    lost: list[str] = []
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(aiohttp.ClientSession()) for _ in range(num_chats + 1)]
        api, pages = clients[-1], [Page(client, number) for number, client in enumerate(clients[:-1])]
        async with Server(folder) as server:
            chain = [(await post(api, f"{server.url}/v1/responses", {"input": "First", "max_output_tokens": 8}))["id"]]
            for page in pages:
                await page.open(server.url)
            await asyncio.gather(*(page.ask() for page in pages))
            batch = await begin_batch(api, server.url, num_rows)
            counts = {"done": 0}
            end = time.monotonic() + 60
            while (len(chain) < 3 or counts["done"] < num_rows // 10) and time.monotonic() < end:
                asked = {"input": "Next", "previous_response_id": chain[-1], "max_output_tokens": 8}
                chain.append((await post(api, f"{server.url}/v1/responses", asked))["id"])
                async with api.get(f"{server.url}/v1/jobs/{batch}?limit=1") as reply:
                    counts = (await reply.json())["counts"]
            killed = await server.kill()
        print(f"killed after {counts['done']} of {num_rows} rows and {len(chain)} responses")
        with sqlite3.connect(folder / "troupe.db") as db:
            ages = [killed - row[0] for row in db.execute(
                "SELECT changed FROM objects WHERE kind = 'turn' AND body LIKE '%\"pending\"%' ORDER BY changed"
            )]  # fmt: skip
        db.close()
        print(f"{len(ages)} answers were being written; last saved before the kill: "
              f"{', '.join(f'{age:.2f}' for age in ages[:3])} s at most")  # fmt: skip
        lost += [f"an answer of {age:.2f} s" for age in ages if age > MAX_LOST_S]
        async with Server(folder) as server:
            for page in pages:
                await page.open(server.url)
                texts = [str(message["content"]) for message in await page.restore()]
                if not texts or f"Question {page.number}" not in texts[0] or len(texts) < 3:
                    lost.append(f"the chat {page.number}: {texts}")
            asked = {"input": "Last", "previous_response_id": chain[-1], "max_output_tokens": 8}
            await post(api, f"{server.url}/v1/responses", asked)
            status = ""
            while status != "completed":
                await asyncio.sleep(0.2)
                async with api.get(f"{server.url}/v1/batches/{batch}") as reply:
                    status = (found := await reply.json())["status"]
            async with api.get(f"{server.url}/v1/files/{found['output_file_id']}/content") as reply:
                seen = Counter(json.loads(line)["custom_id"] for line in (await reply.text()).splitlines())
            print(f"{len(seen)} rows, at most {max(seen.values())} times each; {found['request_counts']}")
            lost += [f"the row {n}: {seen[str(n)]} times" for n in range(num_rows) if seen[str(n)] != 1]
    return lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--rows", type=int, default=500)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lost = asyncio.run(measure(Path(folder), arguments.chats, arguments.rows))
    print("\n".join(["lost:", *lost]) if lost else "nothing is lost")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
