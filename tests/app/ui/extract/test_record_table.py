"""A record as tables: single values side by side, lists of objects one row each."""

from app.ui.extract.record_view import render_table


def test_single_values_are_one_row_and_a_list_of_objects_is_a_table_of_its_own() -> None:
    page = render_table({"n": 1, "who": {"name": "Ada"}, "items": [{"a": 1}, {"a": 2, "b": None}]})
    assert page.count("<table>") == 2 and '<th scope="col">who › name</th>' in page
    assert "<tr><td>2</td><td>null</td></tr>" in page
    assert "<td>&lt;b&gt;</td>" in render_table({"x": "<b>"})
    assert "<td>[1, 2]</td>" in render_table([1, 2]) and render_table({}) == ""


def test_names_of_digits_are_kept() -> None:
    page = render_table({"2023": 1, "a/b": {"0": 2}, "7": [{"x": 1}]})
    assert (
        all(f'<th scope="col">{name}</th>' in page for name in ("2023", "a/b › 0")) and "<h2>7</h2>" in page
    )
