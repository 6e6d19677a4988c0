"""llm: the model as its users set it up, in a file of their own; then its command line."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import MODEL, QUESTION, SCHEMA, is_city, run

SETTINGS = """- model_id: troupe
  model_name: {model}
  api_base: {url}/v1
  api_key_name: troupe
  supports_schema: true
  supports_tools: true
"""
COMMAND = Path(sys.executable).with_name("llm")
TOOL = "def find_weather(city: str) -> str:\n    'Find the weather.'\n    return 'sunny in ' + city\n"


class LLM:
    def __init__(self, url: str, key: str) -> None:
        self._home = tempfile.TemporaryDirectory()
        home = Path(self._home.name)
        (home / "extra-openai-models.yaml").write_text(SETTINGS.format(model=MODEL, url=url))
        (home / "keys.json").write_text(json.dumps({"troupe": key}))
        self._environ = os.environ | {"LLM_USER_PATH": str(home)}

    def _ask(self, *more: str) -> str:
        options = ("-m", "troupe", "-o", "temperature", "0", "-o", "max_tokens", "60")
        done = subprocess.run(
            [COMMAND, "prompt", *options, *more, QUESTION], env=self._environ, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def prompt_and_stream(self) -> None:
        assert self._ask() == self._ask("--no-stream") != ""

    def system_prompt(self) -> None:
        assert self._ask("-s", "Be brief.")

    def conversation(self) -> None:
        self._ask()
        assert self._ask("-c")

    def schema(self) -> None:
        for more in ([], ["--no-stream"]):
            assert is_city(self._ask(*more, "--schema", json.dumps(SCHEMA)))

    def tools(self) -> None:
        assert self._ask("--functions", TOOL)
        assert self._ask("--functions", TOOL, "--no-stream")


if __name__ == "__main__":
    run(LLM)
