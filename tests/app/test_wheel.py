"""A wheel carries what the program needs: it runs from an empty folder, without the repository."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
def test_an_installed_wheel_serves_page_and_api_from_an_empty_folder(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    source, empty, site = tmp_path / "source", tmp_path / "empty", tmp_path / "site"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "tests", "build", "__pycache__"))
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("troupe-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    empty.mkdir()
    path, command = tmp_path / "log", [site / "bin" / "troupe", "--port", "0", "--data-dir", "none"]
    options: dict[str, Any] = {"cwd": empty, "env": os.environ | {"PYTHONPATH": str(site)}}
    with path.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log, **options) as process:
        try:
            while "ready at" not in (text := path.read_text()):
                assert process.poll() is None, text
            url = text.split("ready at ")[1].split()[0].rstrip("/")
            page = urlopen(url).read().decode()
            body = json.dumps({"schema": "contact", "text": "Ada Lovelace, ada@example.com"}).encode()
            found = json.load(urlopen(Request(f"{url}/v1/extract", body, {"Content-Type": "application/json"})))
        finally:
            process.terminate()
    assert "refreshStrip" in page and found["valid"] and list(empty.iterdir()) == []
