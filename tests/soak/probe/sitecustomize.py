"""On SIGUSR2, every Python process of the soak's server counts its live objects of our own classes into a file."""

import collections
import gc
import json
import os
import signal
import threading
from pathlib import Path

PACKAGES = ("engine", "grammar", "app", "asyncio")


def count() -> None:
    gc.collect()
    found: collections.Counter[str] = collections.Counter()
    for each in gc.get_objects():
        kind = type(each)
        module = str(kind.__module__)  # some built-in classes have a descriptor there
        if kind.__name__ == "Task":
            found[f"task of {each.get_coro().__qualname__}"] += 1
        elif module.split(".")[0] in PACKAGES:
            found[f"{module}.{kind.__qualname__}"] += 1
    path = Path(os.environ["SOAK_PROBE"]) / f"{os.getpid()}.json"
    names = sorted(thread.name for thread in threading.enumerate() if thread is not threading.current_thread())
    path.with_suffix(".part").write_text(json.dumps({"objects": found, "threads": names}))
    path.with_suffix(".part").rename(path)


if "SOAK_PROBE" in os.environ:
    # In a thread, because a core whose main thread is silent for two seconds is restarted.
    signal.signal(signal.SIGUSR2, lambda *_: threading.Thread(target=count).start())
