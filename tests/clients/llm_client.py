"""llm: the model as its users set it up, in a file of their own; then its command line."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SETTINGS = """- model_id: troupe
  model_name: demo_model
  api_base: {url}
  api_key_name: troupe
  supports_schema: true
  supports_tools: true
"""
CITY = {"city": {"enum": ["Rome", "Oslo"]}}
SCHEMA = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}


def main() -> None:
    url, key = sys.argv[1:]
    command = [str(Path(sys.executable).with_name("llm")), "prompt", "-m", "troupe"]
    command += ["-o", "temperature", "0", "-o", "max_tokens", "60"]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "extra-openai-models.yaml").write_text(SETTINGS.format(url=url))
        (home / "keys.json").write_text(json.dumps({"troupe": key}))

        def ask(*more: str) -> str:
            environ = os.environ | {"LLM_USER_PATH": folder}
            options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 120}
            run = subprocess.run([*command, *more, "Hello! Who are you?"], env=environ, **options)
            assert run.returncode == 0, run.stderr
            return run.stdout.strip()

        whole = ask("--no-stream")
        assert whole and ask() == whole
        for more in ([], ["--no-stream"]):
            assert json.loads(ask(*more, "--schema", json.dumps(SCHEMA)))["city"] in ("Rome", "Oslo")


if __name__ == "__main__":
    main()
