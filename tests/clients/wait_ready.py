"""Wait until a server answers /health with 200: wait_ready.py URL SECONDS."""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request


def main() -> None:
    url, seconds = sys.argv[1], float(sys.argv[2])
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.3)
    sys.exit(f"the server at {url} was not ready within {seconds:g} s")


if __name__ == "__main__":
    main()
