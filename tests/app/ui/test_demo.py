"""The whole page: it builds, sends nothing to other hosts, and names its model."""

import asyncio
import inspect
import re

import fastapi
import gradio as gr
import httpx
import pytest

from app.api.context import ApiContext
from app.config import AppConfig
from app.ui import make_demo, mount_options
from app.ui.api_hint import CHAT, EXTRACT, find_page_url, make_snippets
from app.ui.chat.welcome import describe_model
from app.ui.late import COMPONENTS, LIBRARIES, write_modules
from app.ui.theme import STYLE_SHEET
from engine import EngineConfig
from tests.fakes import FakeEngine


@pytest.fixture(scope="module")
def demo() -> gr.Blocks:
    # In a loop, which Gradio would otherwise make and never close.
    async def build() -> gr.Blocks:
        return make_demo(ApiContext(FakeEngine(state="starting"), AppConfig()))

    return asyncio.run(build())


def test_the_page_builds_while_the_engine_is_starting(demo: gr.Blocks) -> None:
    labels = [block.label for block in demo.blocks.values() if isinstance(block, gr.Tab)]
    order = ["Extract", "Batch", "Chat", "Engine", "API"]
    assert [label for label in labels if label in order] == order


def test_every_choice_that_grows_takes_an_option_that_this_process_has_not_sent(demo: gr.Blocks) -> None:
    """As after a reload or a restart of the server: Gradio knows only the options that the page was built with."""
    growing = {"Read by", "Answered by", "Column with the text", "Schema of the record"}
    choices = [each for each in demo.blocks.values() if isinstance(each, gr.Dropdown | gr.Radio)]
    found = [each for each in choices if each.label in growing]
    assert len(found) == 5
    for each in found:
        kept = ["large"] if getattr(each, "multiselect", False) else "large"
        assert each.preprocess(kept) == kept


def test_no_analytics_and_room_for_many_events(demo: gr.Blocks) -> None:
    assert demo.analytics_enabled is False
    assert demo._queue.max_thread_count >= 256 and demo._queue.default_concurrency_limit is None


def test_no_handler_is_offered_as_an_api(demo: gr.Blocks) -> None:
    assert [fn.api_name for fn in demo.fns.values() if fn.api_visibility == "public"] == []


def test_handlers_that_read_what_the_event_loop_changes_run_on_it(demo: gr.Blocks) -> None:
    """Gradio runs other handlers in threads, where a dictionary may grow while it is read."""
    found = {fn.name for fn in demo.fns.values() if inspect.iscoroutinefunction(inspect.unwrap(fn.fn))}
    assert {"sort", "act", "open_row"} <= found


def test_the_events_of_an_edited_question_with_files_drop_none_of_each_other(demo: gr.Blocks) -> None:
    """Gradio reports each file of it, too; by default it drops an event while the same one runs."""
    handlers = [fn for fn in demo.fns.values() if fn.fn is not None]  # the others only tell that an event has ended
    (edit,) = [fn for fn in handlers if fn.name == "edit"]
    (watch,) = [fn for fn in handlers if fn.trigger_after == edit._id]
    (end,) = [fn for fn in handlers if fn.trigger_after == watch._id]
    assert [(fn.name, fn.trigger_mode) for fn in (edit, watch, end)] == [
        ("edit", "multiple"), ("watch", "multiple"), ("end", "multiple"),
    ]  # fmt: skip


def test_every_event_reads_anew_what_the_browser_keeps(demo: gr.Blocks) -> None:
    """A tab's earlier copy may be outdated, because other tabs write to the storage too."""
    readers = {"kept-chat": ("readCurrent()",), "kept-settings": ("readSettings()",)}
    found = set()
    # An event without a handler does what its script does.
    for fn in (each for each in demo.fns.values() if each.fn is not None):
        for place, block in enumerate(fn.inputs):
            if (name := getattr(block, "elem_id", None)) in readers:
                assert all(getattr(each, "elem_id", None) in readers for each in fn.inputs[place:])
                assert any(reader in str(fn.js) for reader in readers[name])
                found.add(name)
    assert found == set(readers)
    assert not any(isinstance(block, gr.BrowserState) for block in demo.blocks.values())


def test_theme_and_style_ask_no_other_host() -> None:
    options = mount_options()
    assert options["theme"]._stylesheets == []
    assert "http" not in STYLE_SHEET.read_text(encoding="utf-8")


async def test_the_page_may_load_nothing_from_other_hosts(demo: gr.Blocks) -> None:
    app = gr.mount_gradio_app(fastapi.FastAPI(), demo, path="/", **mount_options(["https://huggingface.co"]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page") as client:
        policy = (await client.get("/")).headers["content-security-policy"]
        assert "content-security-policy" not in (await client.get("/theme.css")).headers
    sources = {source for part in policy.split("; ") for source in part.split()[1:]}
    assert policy.startswith("default-src 'self'; ")
    assert sources == {"'self'", "'none'", "'unsafe-inline'", "'unsafe-eval'", "data:", "blob:", "https://huggingface.co"}
    assert policy.endswith("; frame-ancestors 'self' https://huggingface.co")


async def test_a_refused_frame_is_explained_once(demo: gr.Blocks, caplog: pytest.LogCaptureFixture) -> None:
    app = gr.mount_gradio_app(fastapi.FastAPI(), demo, path="/", **mount_options())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page") as client:
        for site in ("same-origin", "cross-site", "cross-site"):
            await client.get("/theme.css", headers={"sec-fetch-dest": "iframe", "sec-fetch-site": site})
    assert [each.message for each in caplog.records if "--frame-ancestor" in each.message] == [
        "the page was opened in a frame of another site, which it refuses; "
        "--frame-ancestor https://SITE allows that site to show it"
    ]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EngineConfig(), "embedded demo model"),
        (EngineConfig(load_format="dummy"), "Random weights"),
        (EngineConfig(model="some/model", served_model_name="real"), "real"),
    ],
)
def test_the_empty_chat_says_what_answers(config: EngineConfig, words: str) -> None:
    assert words in describe_model(FakeEngine(config=config))


def test_snippets_carry_the_pages_address_and_a_key_where_one_is_needed() -> None:
    for kind in (EXTRACT, CHAT):
        base_url, *codes = make_snippets("http://host:1/", "m", True, kind)
        assert base_url == "http://host:1/v1" and all(base_url in code and "YOUR_KEY" in code for code in codes)
        assert not any("YOUR_KEY" in code for code in make_snippets("http://host:1", "m", False, kind))


@pytest.mark.parametrize(
    ("headers", "root_path", "page_url"),
    [
        ({}, "", "http://inside:7860"),
        ({"x-forwarded-proto": "https"}, "", "https://inside:7860"),
        ({"x-forwarded-proto": "https,http", "x-forwarded-host": "me.hf.space"}, "", "https://me.hf.space"),
        ({}, "https://example.com/troupe", "https://example.com/troupe"),
    ],
)
def test_the_pages_address_is_the_one_before_the_proxy(headers: dict[str, str], root_path: str, page_url: str) -> None:
    raw = [(name.encode(), value.encode()) for name, value in ({"host": "inside:7860"} | headers).items()]
    scope = {"type": "http", "path": "/gradio_api/run/predict", "query_string": b"a=b", "headers": raw}
    request = gr.Request(fastapi.Request(scope | {"scheme": "http", "server": ("inside", 7860)}))
    assert find_page_url(request, root_path) == page_url


async def test_code_of_other_tabs_comes_after_the_record_and_is_all_there(demo: gr.Blocks) -> None:
    app = gr.mount_gradio_app(fastapi.FastAPI(), demo, path="/", **mount_options())
    modules = write_modules()
    assert len([name for name in modules if name.startswith("Index-")]) == len(COMPONENTS)
    assert len(modules) == len(COMPONENTS) + len(LIBRARIES) + 2  # CodeMirror and hls.js
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page") as client:
        for name in modules:
            short, whole = [(await client.get(f"/assets/{name}{query}")).text for query in ("", "?whole")]
            assert len(short) < 4000 < len(whole)
            assert name.startswith("hls-") != ("document.querySelector" in short)
            names, all_names = [
                {each.split(" as ")[-1].strip() for each in re.findall(r"export ?\{(.*)\}", text)[-1].split(",")}
                for text in (short, whole)
            ]
            assert names == all_names
