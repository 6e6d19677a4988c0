"""Loads the word pools and template tables that lie beside the code as plain text."""

import re
from functools import cache
from pathlib import Path

TEMPLATES = Path(__file__).parent / "templates"


@cache
def read_sections(name: str) -> dict[str, tuple[str, ...]]:
    """Lines of `templates/{name}.txt` under each `[section]` header; `#` starts a comment line."""
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in (TEMPLATES / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]") and " " not in line:
            current = sections.setdefault(line[1:-1], [])
        elif line.strip() and not line.startswith("#"):
            current.append(line.replace("\\n", "\n"))
    return {section: tuple(lines) for section, lines in sections.items()}


@cache
def read_worlds() -> dict[str, tuple[str, ...]]:
    """The sections of every `templates/scenes_*.txt`."""
    worlds: dict[str, tuple[str, ...]] = {}
    for path in sorted(TEMPLATES.glob("scenes_*.txt")):
        sections = read_sections(path.stem)
        assert not worlds.keys() & sections.keys(), f"{path.stem}: a world of this name exists"
        worlds |= sections
    return worlds


@cache
def words(section: str) -> tuple[str, ...]:
    """The comma-separated entries of one section of `words.txt`."""
    lines = read_sections("words")[section]
    return tuple(word.strip() for line in lines for word in line.split(",") if word.strip())


@cache
def ordinary_words() -> tuple[str, ...]:
    """Every word of four letters or more that the tables write in small letters."""
    paths = sorted(TEMPLATES.glob("*.txt"))
    texts = (path.read_text(encoding="utf-8").replace("\\n", " ") for path in paths)
    return tuple(
        sorted({word for text in texts for word in re.findall(r"(?<![\w<])[a-z]{4,}(?![\w>:=|])", text)})
    )
