"""A lean page: its components describe themselves as before, and what one session changes stays in it."""

import copy

import gradio as gr
from gradio.blocks import BlocksConfig
from gradio.state_holder import SessionState

from app.ui.lean import LOOK_S, make_lean


def build_page() -> gr.Blocks:
    with gr.Blocks() as demo:
        name = gr.Textbox("before", label="Name", elem_id="name")
        gr.Slider(0, 2, 0.5, label="Temperature", info="how bold")
        gr.UploadButton("Open", file_types=[".json"])
        gr.Dataframe([[1, 2]], headers=["a", "b"])
        gr.State([1])
        name.submit(None, name, name, js="(text) => text", show_progress="hidden")
        name.blur(None, name, name, js="(text) => text")
    return demo


def describe(demo: gr.Blocks) -> dict[int, object]:
    config = demo.default_config
    return {key: copy.deepcopy(BlocksConfig.config_for_block(key, [], b)) for key, b in config.blocks.items()}


async def test_descriptions_stay_what_they_were() -> None:
    demo = build_page()
    before = describe(demo)
    make_lean(demo)
    assert describe(demo) == before
    assert describe(demo) == before  # the first reading left nothing behind
    assert SessionState(demo).config_values == before


async def test_what_a_session_changes_is_its_own() -> None:
    demo = build_page()
    make_lean(demo)
    one, other = SessionState(demo), SessionState(demo)
    key = next(key for key, block in demo.blocks.items() if block.elem_id == "name")
    one._update_value_in_config(key, "after")
    assert one.config_values[key]["props"]["value"] == "after"
    assert other.config_values[key]["props"]["value"] == "before"
    one[key] = gr.Textbox("new", label="Other name")
    one._update_config(key)
    assert one.config_values[key]["props"]["label"] == "Other name"
    assert SessionState(demo).config_values[key]["props"]["label"] == "Name"


async def test_only_an_event_that_shows_progress_changes_the_state_of_its_components() -> None:
    demo = build_page()
    make_lean(demo)
    hidden, shown = demo.get_config_file()["dependencies"]
    assert (hidden["show_progress_on"], shown["show_progress_on"]) == ([], None)


async def test_the_queue_looks_as_often_as_it_must() -> None:
    demo = build_page()
    make_lean(demo)
    assert demo._queue.sleep_when_free == LOOK_S
    assert demo._queue.progress_update_sleep_when_free > LOOK_S
