"""The loading page tells the step, the time and what has been downloaded; all from what is really there."""

import json
from pathlib import Path

from app.loading import Loading
from engine import EngineConfig
from tests.fakes import FakeEngine


class StartingEngine(FakeEngine):
    """An engine in the middle of its start."""

    timeline: list[tuple[str, float]] = []  # noqa: RUF012


def make_loading(cache: Path, *done: str, state: str = "starting") -> Loading:
    config = EngineConfig(model="some/model", served_model_name="<b>model")
    engine = StartingEngine(state=state, config=config)
    engine.timeline = [(name, 1.0) for name in done]
    clock = iter((10.0, 12.5, 20.0))
    return Loading(engine, cache, clock=lambda: next(clock))


def test_the_steps_come_one_after_the_other(tmp_path: Path) -> None:
    assert make_loading(tmp_path).describe()["step"] == "tokenizer"
    assert make_loading(tmp_path, "tokenizer").describe()["step"] == "weights"
    assert make_loading(tmp_path, "tokenizer", state="ready").describe()["step"] == "page"


def test_a_download_is_counted_with_its_unfinished_files(tmp_path: Path) -> None:
    folder = tmp_path / "models--some--model"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "a").write_bytes(b"x" * 100)
    (folder / "blobs" / "b.incomplete").write_bytes(b"x" * 50)
    assert make_loading(tmp_path, "tokenizer").describe() == {
        "step": "weights", "seconds": 2.5, "downloaded_bytes": 150, "total_bytes": None,
    }  # fmt: skip
    (folder / "snapshots" / "1").mkdir(parents=True)
    # of a second copy of the weights, which is not downloaded
    (folder / "snapshots" / "1" / "consolidated.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 999}})
    )
    assert make_loading(tmp_path, "tokenizer").describe()["total_bytes"] is None
    index = folder / "snapshots" / "1" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 400}}))
    assert make_loading(tmp_path, "tokenizer").describe()["total_bytes"] == 400
    index.write_text('{"metadata"')
    assert make_loading(tmp_path, "tokenizer").describe()["total_bytes"] is None


def test_a_local_folder_has_no_download(tmp_path: Path) -> None:
    loading = Loading(StartingEngine(config=EngineConfig(model=str(tmp_path))), tmp_path)
    assert set(loading.describe()) == {"step", "seconds"}


def test_the_page_names_the_model_and_lets_no_markup_in(tmp_path: Path) -> None:
    drawn = make_loading(tmp_path).draw()
    assert "Loading &lt;b&gt;model" in drawn and '"step": "tokenizer"' in drawn
    assert "{{model}}" not in drawn and "{{progress}}" not in drawn
