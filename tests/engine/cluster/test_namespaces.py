"""Three network namespaces: the front in one, a headless replica in each of the others, and links that fail."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.app.api.harness import needs_model
from tests.engine.cluster.fault_run import NAMESPACE

FRONT = "troupe-front"


def run_ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


@pytest.fixture
def address() -> Iterator[str]:
    """The front's address. A bridge connects it with each core."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip of iproute2")
    names = (FRONT, f"{NAMESPACE}0", f"{NAMESPACE}1")
    for name in names:  # of a run that was killed
        run_ip("netns", "delete", name)
    made = run_ip("netns", "add", FRONT)
    if made.returncode:
        pytest.skip(f"network namespaces are not permitted: {made.stderr.strip()}")
    try:
        run_ip("-n", FRONT, "link", "set", "lo", "up")
        run_ip("-n", FRONT, "link", "add", "bridge", "type", "bridge")
        run_ip("-n", FRONT, "address", "add", "10.98.0.1/24", "dev", "bridge")
        run_ip("-n", FRONT, "link", "set", "bridge", "up")
        for rank in range(2):
            core = f"{NAMESPACE}{rank}"
            run_ip("netns", "add", core)
            run_ip("-n", FRONT, "link", "add", f"front{rank}", "type", "veth", "peer", core, "netns", core)
            run_ip("-n", FRONT, "link", "set", f"front{rank}", "up", "master", "bridge")
            run_ip("-n", core, "address", "add", f"10.98.0.{rank + 2}/24", "dev", core)
            last = run_ip("-n", core, "link", "set", core, "up")
        if last.returncode:
            pytest.skip(f"virtual networks are not permitted: {last.stderr.strip()}")
        yield "10.98.0.1"
    finally:
        for name in names:
            run_ip("netns", "delete", name)


@pytest.mark.soak
@needs_model
def test_replicas_in_other_networks_lose_nothing_when_a_link_fails(address: str) -> None:
    module = ["-m", "tests.engine.cluster.fault_run", "--fault", "link", "--address", address]
    sizes = ["--replicas", "2", "--streams", "9", "--faults", "1"]
    command = ["ip", "netns", "exec", FRONT, sys.executable, *module, *sizes]
    ran = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["faults"] >= 1 and found["resumed"] > 0
