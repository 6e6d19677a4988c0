"""The app_file of a Hugging Face Space: `serve` on the address that Hugging Face Spaces expects.

The only file that touches sys.path: a Space runs it as a script, so its own folder would be searched instead
of the root.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]

import os  # noqa: E402

from app.cli.main import main  # noqa: E402

ZERO_GPU = (
    "This Space has ZeroGPU, but no variable TROUPE_MODEL: the embedded model needs no GPU, so it uses the CPU, and "
    "visitors keep their quota."
)


def make_arguments(environ: Mapping[str, str]) -> list[str]:
    """The flags of `serve` for where we run; flags given by hand come after them and win."""
    arguments = ["serve"]
    if environ.get("SYSTEM") == "spaces":
        arguments += ["--host", "0.0.0.0", "--port", "7860"]
        # Hugging Face shows a Space in a frame of its own pages.
        arguments += ["--frame-ancestor", "https://huggingface.co", "--frame-ancestor", "https://*.hf.space"]
        # the disk of a Space, if it has one; the rest of its files is lost at every restart
        arguments += ["--data-dir", "/data/troupe" if os.access("/data", os.W_OK) else "none"]
    if is_zero_gpu(environ):
        arguments += ["--zero-gpu"] if environ.get("TROUPE_MODEL") else ["--device", "cpu"]
    return arguments


def is_zero_gpu(environ: Mapping[str, str]) -> bool:
    """Return whether the GPU comes and goes."""
    return environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "true")


if __name__ == "__main__":
    if is_zero_gpu(os.environ) and not os.environ.get("TROUPE_MODEL"):
        print(ZERO_GPU, file=sys.stderr)
    sys.exit(main([*make_arguments(os.environ), *sys.argv[1:]]))
