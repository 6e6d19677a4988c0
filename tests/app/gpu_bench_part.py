"""A part of `bench gpu` that does what its name says: for the tests of what the others survive."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    name, target = sys.argv[1], Path(sys.argv[3])
    if name == "hangs":
        threading.Event().wait()
    if name == "fails":
        sys.exit("the device fell off")
    target.write_text(json.dumps({"arguments": sys.argv[4:]}))
