"""The list of a visitor's recent documents, and that one does not replace another."""

from typing import Any

from app.store import Limits, Store
from app.store.objects import Json
from app.ui.extract.projects import MAX_NAME, MAX_RECENT, list_recent, put_project

SAMPLE = "/samples/invoice_2.txt"


def make_body(text: str, path: str = "", **record: Any) -> Json:
    kept = {"text": text, "schema": {}, "approved": False} | record if record else None
    return {"text": text, "schema": "{}", "record": kept, "path": path}


async def put(store: Store, owner: str, body: Json, project: str = "") -> str:
    return await store.run(put_project, owner, project, body)


async def list_names(store: Store, owner: str) -> list[tuple[str, bool]]:
    found = await store.run(list_recent, owner, [SAMPLE])
    return [(each["name"], each["state"] == "approved") for each in found]


async def test_the_list_has_the_latest_ten_of_its_owner() -> None:
    clock = iter(range(10_000))
    store = Store(None, Limits(), lambda: float(next(clock)))
    ids = [await put(store, "me", make_body(f"Mail {number}")) for number in range(MAX_RECENT + 2)]
    await put(store, "you", make_body("Secret"))
    await put(store, "me", make_body("Mail 0", approved=True), ids[0])
    newest = [("Mail 0", True), *((f"Mail {number}", False) for number in range(MAX_RECENT + 1, 2, -1))]
    assert await list_names(store, "me") == newest
    assert await list_names(store, "you") == [("Secret", False)] and await list_names(store, "") == []


async def test_a_document_has_the_name_of_its_file_or_its_first_words() -> None:
    store = Store()
    for body in (
        make_body("INV-1", SAMPLE), make_body("INV-1", SAMPLE, approved=True),
        make_body("", "/tmp/photo.png") | {"name": "photo.png"}, make_body(" \n"),
        make_body("Dear\n Ada, " + "so " * 90),
    ):
        await put(store, "me", body)
    names = [name for name, _ in await list_names(store, "me")]
    assert names == [f"Dear Ada, {'so ' * 90}"[:MAX_NAME] + "…", "photo.png", "INV-1"]


async def test_a_record_is_not_replaced_by_another_document() -> None:
    store = Store()
    first = await put(store, "me", make_body("Ada", approved=True))
    corrected, edited = make_body("Ada", approved=False), make_body("Ada", approved=True) | {"schema": "[]"}
    others = [make_body("Bob"), make_body("Bob", approved=False), make_body("Ada"), edited]
    made = [await put(store, "me", body, first) for body in others]
    assert len({first, *made}) == 5
    assert await put(store, "me", corrected, first) == first
    # A record beside a text that was typed since is set aside: the next one takes its place.
    aside = await put(store, "me", make_body("Ada", approved=True) | {"text": "Eve"}, first)
    assert aside != first and (await list_names(store, "me"))[0] == ("Eve", False)
    assert await put(store, "me", make_body("Eve", approved=True), aside) == aside
