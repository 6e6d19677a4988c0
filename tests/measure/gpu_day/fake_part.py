"""A part that does what its name says: for the tests of what the others survive."""

import json
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    _, name, _, target, *arguments = sys.argv
    if name == "hangs":
        threading.Event().wait()
    if name == "fails":
        sys.exit("the device fell off")
    Path(target).write_text(json.dumps({"arguments": arguments}))
