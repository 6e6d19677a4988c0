"""Attached files: their text stands in a fence that it cannot leave."""

from pathlib import Path

import pytest

from app.ui.chat import attachments
from app.ui.chat.attachments import add_attachments, fence, load_images
from app.ui.chat.conversation import to_model_messages, user_message
from app.ui.chat.store import plain_message
from engine import InvalidRequest


def test_a_text_with_fences_is_fenced_by_a_longer_one() -> None:
    assert fence("a ````` b") == "``````\na ````` b\n``````" and fence("a") == "```\na\n```"


async def test_files_follow_the_words_in_order(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name[0])
    text = await add_attachments(" Compare ", [tmp_path / "a.txt", tmp_path / "b.txt"])
    assert text == "Compare\n\na.txt\n```\na\n```\n\nb.txt\n```\nb\n```"
    assert await add_attachments("", []) == ""


async def test_a_file_that_is_too_large_or_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "MAX_BYTES", 1)
    (tmp_path / "a.txt").write_text("ab")
    for name, words in (("a.txt", "a.txt is larger"), ("b.txt", "b.txt")):
        with pytest.raises(InvalidRequest, match=words):
            await add_attachments("", [tmp_path / name])


def test_images_are_read_from_the_upload_folder_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "get_upload_folder", lambda: str(tmp_path / "uploads"))
    (tmp_path / "uploads").mkdir()
    for path in (tmp_path / "secret.png", tmp_path / "uploads" / "a.png"):
        path.write_bytes(b"x")
    question = user_message("What?", [str(tmp_path / "uploads" / "a.png")])
    messages = load_images(to_model_messages([question], ""))
    assert messages[0]["content"] == [{"type": "image", "image": b"x"}, {"type": "text", "text": "What?"}]
    for wrong in ("secret.png", "uploads/../secret.png", "uploads/gone.png"):
        question = user_message("What?", [str(tmp_path / wrong)])
        with pytest.raises(InvalidRequest, match="no longer on the server"):
            load_images(to_model_messages([question], ""))
    assert plain_message(question)["content"] == "[image: gone.png]\nWhat?"
