"""A Space with ZeroGPU in one process: `python -m tests.app.zero_gpu.space LEASE_S FLAG...`

It has the real package `spaces`, a device API on loopback in place of Hugging Face's, and a CPU core in place of CUDA.
The API obeys the payload of the visitor's token: {"quota_s": seconds that are left}.
Each line on stdout that begins with "device" is one event of the API.
"""

import base64
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

TOKEN_HEADER = "X-IP-Token"
SPARE_S = 1.0  # after the end of a lease, until its fork is killed


def make_token(visitor: str, **payload: Any) -> str:
    text = json.dumps(payload | {"visitor": visitor}).encode()
    return f"e30.{base64.urlsafe_b64encode(text).decode().rstrip('=')}.c2ln"


class Device:
    """The GPU's only slot, and what visitors have used of it."""

    def __init__(self) -> None:
        self.leases: dict[str, float] = {}  # by allowToken, after how many seconds it is killed
        self.num_leases = 0

    def schedule(self, query: dict[str, str]) -> tuple[int, Any]:
        payload = {}
        if (token := query.get("token")) is not None:
            part = token.split(".")[1]
            payload = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        seconds = int(query["durationSeconds"])
        if seconds > payload.get("quota_s", 3600):
            note("refused", payload.get("visitor"))
            return 429, {"left": payload["quota_s"], "wait": "PT3600S"}
        self.num_leases += 1
        lease = f"lease-{self.num_leases}"
        self.leases[lease] = seconds + SPARE_S
        note("scheduled", payload.get("visitor"))
        return 200, {"idle": True, "nvidiaIndex": 0, "nvidiaUUID": "MIG-0", "allowToken": lease}

    def allow(self, query: dict[str, str]) -> tuple[int, Any]:
        pid, lease = int(query["pid"]), self.leases[query["allowToken"]]

        def kill() -> None:
            if query["allowToken"] in self.leases:
                note("killed", pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        note("allowed", pid)
        timer = threading.Timer(lease, kill)
        timer.daemon = True
        timer.start()
        return 200, {}

    def release(self, query: dict[str, str]) -> tuple[int, Any]:
        found = self.leases.pop(query["allowToken"], None)
        note("released", query["fail"])
        return (404 if found is None else 200), {}


def note(event: str, what: object) -> None:
    print("device", event, what, flush=True)


def serve_device() -> str:
    device = Device()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            answers = {"/schedule": device.schedule, "/allow": device.allow, "/release": device.release}
            status, body = (200, {}) if url.path == "/startup-report" else answers[url.path](query)
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            """Keep stderr for the server."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def is_in_bad_fork() -> bool:
    return False


def main() -> int:
    lease_s, *flags = sys.argv[1:]
    os.environ |= {"SPACES_ZERO_GPU": "true", "SPACES_ZERO_DEVICE_API_URL": serve_device()}
    if torch.version.cuda is None:  # what `spaces` reads of a build for CUDA
        torch.version.cuda, torch._C._cuda_init = "12.8", None  # type: ignore[attr-defined]
        torch.cuda._is_in_bad_fork = is_in_bad_fork
    import spaces.zero.torch as emulation

    # What a fork does with its GPU before the call.
    emulation.init = lambda uuid: None
    emulation.move = lambda callback=None: None
    emulation.size = lambda: 0
    from app import space_gpu
    from app.cli.main import main as serve

    space_gpu.LEASE_S = int(lease_s)
    space_gpu.make_leased_engine.__defaults__ = (int(lease_s),)
    return serve(["serve", "--zero-gpu", "--device", "cpu", *flags])


if __name__ == "__main__":
    sys.exit(main())
