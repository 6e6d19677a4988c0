"""One server with the demo model and one headless Chromium; each test gets a fresh page that it must keep clean."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser.site import PATIENCE_S, Site

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking", "--no-first-run"
]
READY = "Troupe is ready at "
# A site that may show the page in a frame.
FRAMER = "http://localhost"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--site", metavar="URL", help="drive a server that runs already, instead of a fresh one")
    parser.addoption("--screenshots", metavar="DIR", help="write the README's screenshots into this folder")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            # The first one also pays for the server and the browser; a loaded machine is slow, not wrong.
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    # Until the package ends and no longer: Playwright keeps a loop of its own running in this thread.
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        browser.phone, browser.path = driver.devices["Pixel 7"], path
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def base_url(request: pytest.FixtureRequest) -> Iterator[str]:
    given = request.config.getoption("--site", default=None)
    if given is not None:
        yield given.rstrip("/")
        return
    yield from start_server("app", "--frame-ancestor", FRAMER)


@pytest.fixture(scope="package")
def flag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that makes the next step of the lasting server fail."""
    return tmp_path_factory.mktemp("fragile") / "break"


@pytest.fixture(scope="package")
def lasting_url(flag: Path) -> Iterator[str]:
    """A server whose answers take minutes, on any machine: made-up tokens, 8 a second; two run and one waits."""
    limits = ("--max-num-seqs", "2", "--max-num-waiting", "1")
    yield from start_server("tests.browser.fragile_app", str(flag), "--mock-step-ms", "120", "--core", "local", *limits)


def start_server(module: str = "app", *arguments: str) -> Iterator[str]:
    """The address of a fresh server with the demo model."""
    with run_server(module, *arguments) as (_, url):
        yield url


@contextmanager
def run_server(module: str = "app", *arguments: str, port: int = 0) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run a server with the demo model; yields its process and its address."""
    if not (ROOT / "assets" / "demo_model" / "model.safetensors").exists():
        pytest.skip("assets/demo_model has no weights")
    command = [sys.executable, "-m", module, "serve", *arguments, "--port", str(port), "--shutdown-grace-s", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            line = next((line for line in server.stdout if line.startswith(READY)), None)
            assert line is not None, f"the server ended with {server.wait()} before it was ready"
            yield server, line.removeprefix(READY).split()[0]
        finally:
            server.terminate()
            server.wait(PATIENCE_S)


@pytest.fixture(scope="package")
def desk(chromium: Any) -> Iterator[Any]:
    """One context for all desktop pages: they share the browser's cache, which saves seconds a test."""
    # Narrower than the width from which the list of chats is open.
    context = chromium.new_context(viewport={"width": 1200, "height": 800}, reduced_motion="reduce")
    context.new_page()  # the window closes with its last page, and another one costs the browser 2 s
    yield context
    context.close()


@pytest.fixture
def site(desk: Any, base_url: str) -> Iterator[Site]:
    """A desktop page."""
    yield from open_site(desk, base_url)


@pytest.fixture
def unopened(desk: Any, base_url: str) -> Iterator[Site]:
    """A desktop page that the test opens."""
    yield from open_site(desk, base_url, None)


@pytest.fixture
def lasting(desk: Any, lasting_url: str) -> Iterator[Site]:
    """A desktop page of the server whose answers end when they are stopped, or at their token limit."""
    yield from open_site(desk, lasting_url)


@pytest.fixture
def workbench(request: pytest.FixtureRequest, desk: Any, base_url: str) -> Iterator[Site]:
    """A page that opens at the Extract tab, which extracts an example by itself; its size may be a parameter."""
    yield from open_site(desk, base_url, "extract", getattr(request, "param", None))


@pytest.fixture
def two_models(desk: Any, tmp_path: Path) -> Iterator[Site]:
    """An unopened page of a server that may load the demo model again, as `second`, and lists many models."""
    for name in ("second", "third", "fourth"):
        (tmp_path / name).symlink_to(ROOT / "assets" / "demo_model")
    with run_server("app", "--models-dir", str(tmp_path), "--chat-model", "none") as (_, url):
        yield from open_site(desk, url, None)


@pytest.fixture
def phone(chromium: Any, base_url: str) -> Iterator[Site]:
    """A page on a phone."""
    context = chromium.new_context(**chromium.phone, color_scheme="dark", reduced_motion="reduce")
    yield from open_site(context, base_url)
    context.close()


def open_site(
    context: Any, base_url: str, tab: str | None = "chat", size: tuple[int, int] | None = None
) -> Iterator[Site]:
    """A page that at the end must not have complained or called out."""
    site = Site(context.new_page(), base_url)
    if size is not None:
        site.resize(*size)
    if tab is not None:
        site.open(tab)
    yield site
    site.page.close()
    assert site.complaints == []
    assert site.external_requests == []
