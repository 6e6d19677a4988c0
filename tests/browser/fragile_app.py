"""`python -m tests.browser.fragile_app serve FILE FLAGS`: the app, whose next step fails once FILE is there.

Steps are those of `--mock-step-ms`; the crash, the restart, and what the page says meanwhile are real. The restart
waits until FILE is gone again.
"""

import sys
import time
from pathlib import Path
from typing import Any

from app.cli.main import main
from engine.worker.mock_worker import MockWorker


def break_once(flag: Path) -> None:
    """Let the first step fail that finds the flag, and the restart after it wait until it is taken away."""
    execute, reset = MockWorker.execute, MockWorker.reset
    has_failed = False

    def fail(worker: MockWorker, plan: Any) -> Any:
        nonlocal has_failed
        if flag.exists() and not has_failed:
            has_failed = True
            raise RuntimeError("the device is on fire")
        return execute(worker, plan)

    def rest(worker: MockWorker) -> None:
        while has_failed and flag.exists():
            time.sleep(0.02)
        reset(worker)

    MockWorker.execute, MockWorker.reset = fail, rest  # type: ignore[method-assign]


if __name__ == "__main__":
    _, verb, file, *flags = sys.argv
    break_once(Path(file))
    sys.exit(main([verb, *flags]))
