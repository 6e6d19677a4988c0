"""`python -m tests.browser.fragile_app FILE FLAGS`: the app, whose next step fails once FILE is there.

Everything else is real: the crash, the restart, and what the page says meanwhile. The restart waits until FILE is
gone again.
"""

import sys
import time
from pathlib import Path
from typing import Any

from app.cli.main import main
from engine.worker.worker import Worker


def break_once(flag: Path) -> None:
    """Let the first step fail that finds the flag, and the restart after it wait until it is taken away."""
    execute, reset = Worker.execute, Worker.reset
    has_failed = False

    def fail(worker: Worker, plan: Any) -> Any:
        nonlocal has_failed
        if flag.exists() and not has_failed:
            has_failed = True
            raise RuntimeError("the device is on fire")
        return execute(worker, plan)

    def rest(worker: Worker) -> None:
        while has_failed and flag.exists():
            time.sleep(0.02)
        reset(worker)

    Worker.execute, Worker.reset = fail, rest  # type: ignore[method-assign]


if __name__ == "__main__":
    break_once(Path(sys.argv[1]))
    sys.exit(main(["serve", *sys.argv[2:]]))
