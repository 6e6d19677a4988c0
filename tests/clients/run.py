"""Run other people's clients against the demo model: each is installed into a virtual environment of its own.

python -m tests.clients.run [--home FOLDER] [CLIENT ...]

The folder keeps the environments for the next run; without one they are made anew and removed. The packages come from
the index that pip is set up for; the server and the clients use loopback only. Fails if a case does, unless KNOWLEDGE
names what a demo model lacks for it.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from app.bench.own_server import run_server

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KEY = "client-key"
FLAGS = ["--api-key", KEY, "--served-model-name", "demo_model", "--no-ui"]
# client -> its packages; litellm looks for mcp as soon as a request has tools, and does not ask for it itself
PACKAGES = {
    "langchain": ["langchain", "langchain-openai", "langchain-anthropic"], "litellm": ["litellm", "mcp"],
    "instructor": ["instructor", "anthropic"], "pydantic_ai": ["pydantic-ai-slim[openai,anthropic]"],
}
# client and case -> what the demo model would have to know
KNOWLEDGE = {
    ("instructor", "parallel tools"): "to call tools by itself",
    ("instructor", "iterable"): "to use the properties that a schema names rather than others that it allows",
    ("instructor", "json"): "to follow a schema that is in the prompt only",
    ("instructor", "md json"): "to follow a schema that is in the prompt only",
    ("pydantic_ai", "prompted output"): "to follow a schema that is in the prompt only",
}


def make_model(folder: Path) -> None:
    """Write the demo model with the files by which it makes embeddings, too."""
    for path in (ROOT / "assets" / "demo_model").iterdir():
        (folder / path.name).symlink_to(path)
    parts = [{"path": path, "type": f"sentence_transformers.models.{path[2:] or 'Transformer'}"} for path in
             ("", "1_Pooling", "2_Normalize")]
    (folder / "modules.json").write_text(json.dumps(parts))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 256, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def find_python(home: Path, client: str) -> Path:
    """Return the client's own interpreter, installed at its first use."""
    folder = home / client
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
        install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES[client]]
        subprocess.run([folder / "bin" / "python", *install], check=True)
    return folder / "bin" / "python"


def run_client(home: Path, client: str, url: str) -> tuple[int, int, int]:
    """Print every case of a client; returns how many passed, how many there are, and how many failed unexpectedly."""
    command = [str(find_python(home, client)), str(HERE / f"{client}_client.py"), url, KEY]
    num_passed, num_cases, num_wrong = 0, 0, 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith('{"case"'):
                continue
            case, error = json.loads(line).values()
            needed = KNOWLEDGE.get((client, case))
            num_passed, num_cases = num_passed + (error is None), num_cases + 1
            num_wrong += error is not None and needed is None
            told = f"FAILED, the model would have {needed}" if needed else f"FAILED: {error}"[:600]
            told = "passed" if error is None else told
            print(f"{client}: {case}: {told}", flush=True)
    if process.returncode:
        raise SystemExit(f"{client}: its cases ended with {process.returncode}")
    return num_passed, num_cases, num_wrong


async def main() -> int:
    parser = argparse.ArgumentParser(description="Run other people's clients against the demo model.")
    parser.add_argument("--home", type=Path, help="folder that keeps the virtual environments")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(PACKAGES))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as model:
        make_model(Path(model))
        home, counts = given.home or Path(made), {}
        async with run_server(["--model", model, *FLAGS]) as url:
            for client in given.clients or PACKAGES:
                counts[client] = await asyncio.to_thread(run_client, home, client, url)
    for client, (num_passed, num_cases, _) in counts.items():
        print(f"{client:12} {num_passed:3} of {num_cases:3}")
    num_passed, num_cases, num_wrong = (sum(column) for column in zip(*counts.values(), strict=True))
    print(f"{'all':12} {num_passed:3} of {num_cases:3}, {num_passed / num_cases:.3f}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
