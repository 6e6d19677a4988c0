"""assets/deploy: the manifests fit the server that they start, and the commands of the container files run."""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.api.errors import HEALTH_PATHS
from app.cli.imports import import_large
from app.cli.main import VERBS
from app.cli.parser import Parser
from app.cli.variables import check_variables
from engine import list_metrics

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "assets" / "deploy"
CONTAINER_FILES = sorted(DEPLOY.glob("Containerfile.*"))
STUB = (
    '#!/bin/sh\nprintf "%s" "$(basename "$0")" >> "$CALLS"\nprintf " %s" "$@" >> "$CALLS"\necho >> "$CALLS"\n'
)


def read_manifests() -> list[dict[str, Any]]:
    paths = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [each for path in paths for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def read_instructions(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    pairs = (line.split(None, 1) for line in lines if line.strip() and not line.startswith("#"))
    return [(name, text) for name, text in pairs]


def parse(arguments: list[str]) -> argparse.Namespace:
    """As the command line does.

    Raises:
        UsageError: a flag is unknown.
    """
    parser = Parser(allow_abbrev=False)
    import_large(VERBS[arguments[0]][0]).add_arguments(parser)
    return parser.parse_args(arguments[1:])


MANIFESTS = {each["kind"]: each for each in read_manifests() if "kind" in each}
PODS = [MANIFESTS[kind] for kind in ("StatefulSet", "Deployment")]


@pytest.mark.parametrize("manifest", PODS, ids=lambda each: each["kind"])
def test_pods_have_flags_variables_and_probes_that_exist(manifest: dict[str, Any]) -> None:
    template = manifest["spec"]["template"]
    assert template["metadata"]["labels"].items() >= manifest["spec"]["selector"]["matchLabels"].items()
    (container,) = template["spec"]["containers"]
    given = vars(parse(container["args"]))
    check_variables({each["name"]: "x" for each in container["env"]})
    assert {"TROUPE_API_KEY"} <= {each["name"] for each in container["env"]}
    probes = [container[name]["httpGet"] for name in container if name.endswith("Probe")]
    assert len(probes) >= 2
    assert all(probe["path"] in HEALTH_PATHS and probe["port"] == "http" for probe in probes)
    assert [port["containerPort"] for port in container["ports"]] == [7860]
    grace = template["spec"].get("terminationGracePeriodSeconds", 30)
    assert given.get("shutdown_grace_s", 5.0) < grace


def test_the_router_lists_every_server_that_the_autoscaler_may_start() -> None:
    scaler, servers = MANIFESTS["HorizontalPodAutoscaler"]["spec"], MANIFESTS["StatefulSet"]
    (router,) = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["containers"]
    name, service = servers["metadata"]["name"], servers["spec"]["serviceName"]
    expected = [f"http://{name}-{number}.{service}:7860" for number in range(scaler["maxReplicas"])]
    assert parse(router["args"]).worker_urls == expected
    headless = next(each for each in read_manifests() if each.get("metadata", {}).get("name") == service)
    assert headless["spec"]["clusterIP"] == "None"
    assert scaler["scaleTargetRef"]["name"] == name


def test_the_autoscaler_reads_metrics_that_the_server_has() -> None:
    rules = next(each for each in read_manifests() if "rules" in each)["rules"]["custom"]
    series = {re.match(r"[\w:]+", rule["seriesQuery"])[0] for rule in rules}  # type: ignore[index]
    assert series <= {"troupe:" + name for _, _, name, _ in list_metrics()}
    used = {
        each["pods"]["metric"]["name"] for each in MANIFESTS["HorizontalPodAutoscaler"]["spec"]["metrics"]
    }
    assert used == {name.replace(":", "_") for name in series}


@pytest.mark.parametrize("path", CONTAINER_FILES, ids=lambda path: path.suffix)
def test_commands_of_a_container_file_run_in_a_clean_environment(path: Path, tmp_path: Path) -> None:
    """Installers only note their arguments; one server runs, from nothing but the copied files."""
    tools, work, calls = tmp_path / "bin", tmp_path / "srv", tmp_path / "calls"
    tools.mkdir()
    work.mkdir()
    for name in ("pip", "apt-get", "useradd", "rm"):
        (tools / name).write_text(STUB)
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path), "CALLS": str(calls)}
    command: list[str] = []
    for instruction, text in read_instructions(path):
        match instruction:
            case "COPY":
                copy(text.split()[0], work / text.split()[1])
            case "RUN":
                subprocess.run(["sh", "-ec", text], cwd=work, env=environment, check=True)
            case "ENV":
                environment |= dict(pair.split("=", 1) for pair in shlex.split(text))
            case "ENTRYPOINT" | "CMD":
                command += json.loads(text)
    pin = next(
        line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch==")
    )
    installed = [line for line in calls.read_text().splitlines() if line.startswith("pip ")]
    assert installed[0].endswith(f" {pin}") and installed[1].endswith("-r requirements.txt")
    check_variables({name: "x" for name in environment if name.startswith("TROUPE_")})
    assert environment["TROUPE_HOST"] == "0.0.0.0"
    assert command == ["python", "-m", "app", "serve"]
    assert {each.name for each in work.iterdir()} >= {"app", "engine", "grammar", "kernels", "assets"}
    if path.suffix == ".cuda":
        return  # it would start the same server
    # Not beyond this machine, on a free port, without a model and without a GPU.
    environment |= {
        "TROUPE_HOST": "127.0.0.1",
        "TROUPE_PORT": "0",
        "TROUPE_MOCK_STEP_MS": "0",
        "TROUPE_DEVICE": "cpu",
    }
    serve(command, work, environment | {"TROUPE_UI": "false", "TROUPE_CORE": "local"})


def copy(source: str, target: Path) -> None:
    if (ROOT / source).is_file():
        shutil.copy(ROOT / source, target)
    else:
        shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__", "recipe"))


def serve(command: list[str], work: Path, environment: dict[str, str]) -> None:
    """Run the container's command with this Python, ask for its health, and end it as Kubernetes does."""
    process = subprocess.Popen(
        [sys.executable, *command[1:]],
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None, process.communicate()[1]
        with urllib.request.urlopen(f"{address[0]}/readyz", timeout=20) as response:
            assert response.status == 200
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0
