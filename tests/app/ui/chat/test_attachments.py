"""Attached files: their text stands in a fence that it cannot leave."""

from pathlib import Path

import pytest

from app.ui.chat import attachments
from app.ui.chat.attachments import load_images, read_files, write_files
from app.ui.chat.conversation import fence, file_message, lay_out, to_model_messages, user_message
from app.ui.chat.store import make_title, plain_message
from engine import InvalidRequest


def test_a_text_with_fences_is_fenced_by_a_longer_one() -> None:
    assert fence("a ````` b") == "``````\na ````` b\n``````" and fence("a") == "```\na\n```"


async def test_files_follow_the_words_in_order_and_a_page_shows_their_names(tmp_path: Path) -> None:
    for name in ("a.txt", "b_.txt"):
        (tmp_path / name).write_text(name[0] * 5000)
    files = await read_files([tmp_path / "a.txt", tmp_path / "b_.txt"])
    a, b = "a" * 5000, "b" * 5000
    assert to_model_messages([user_message("Compare"), *files], "") == [
        {"role": "user", "content": f"Compare\n\na.txt\n```\n{a}\n```\n\nb_.txt\n```\n{b}\n```"}
    ]
    assert to_model_messages([user_message(""), files[0]], "")[0]["content"] == f"a.txt\n```\n{a}\n```"
    shown = lay_out([user_message("Compare"), *files])
    assert [each["metadata"]["title"] for each in shown[1:]] == ["**a.txt**", r"**b\_.txt**"]
    assert len(shown[1]["content"]) < 4100
    assert [plain_message(each) for each in files] == files
    assert make_title([user_message(""), *files]) == "a.txt"


async def test_files_are_written_again_when_a_question_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachments, "get_upload_folder", lambda: str(tmp_path))
    paths = write_files([user_message("?"), file_message("../a.txt", "one"), file_message("b.pdf", "two")])
    assert [Path(path).name for path in paths] == ["a.txt", "b.pdf.txt"]
    assert [each["content"] for each in await read_files(paths)] == ["one", "two"]
    assert all(Path(path).is_relative_to(tmp_path) for path in paths)


async def test_a_file_that_is_too_large_or_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "MAX_BYTES", 1)
    (tmp_path / "a.txt").write_text("ab")
    for name, words in (("a.txt", "a.txt is larger"), ("b.txt", "b.txt")):
        with pytest.raises(InvalidRequest, match=words):
            await read_files([tmp_path / name])


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
