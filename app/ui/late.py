"""Draws the first record before the code of other tabs arrives, for visits on a slow network.

Gradio's page asks at once for the code of the components of all tabs. In the place of what Extract needs for no record
it gets modules of a few lines, which import the real ones once a record is drawn. Streamed video is never played.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import gradio as gr
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

ASSETS = Path(gr.__file__).parent / "templates" / "frontend" / "assets"
# Components that are in other tabs or folded away, and libraries that only they use; compressed 105 kB and 95 kB.
COMPONENTS = ("code", "chatbot", "multimodaltextbox")
LIBRARIES = ("markdown-code-*.js", "prism-*.js", "MinimalAudioPlayer-*.js", "Video-*.js")
EDITOR = "cm-content"  # a class of CodeMirror, whose file is called dist-*.js as others are
EXPORTS = re.compile(r"export\{([^{}]*)\};?\s*$")  # at the end of a file: `export{a as b,c as d};`
WHOLE = "whole"  # the query of the real file

NEVER = "const none = () => {};\nnone.isSupported = () => false;\n"  # hls.js, 152 kB
LATER = """const isDue = () => performance.now() > 30000 || !/^(#extract)?$/.test(location.hash)
|| document.querySelector(".record .value");
await new Promise((resolve) => {
const look = () => isDue() ? resolve() : setTimeout(look, 100);
for (const kind of ["pointerdown", "keydown"]) addEventListener(kind, resolve, { once: true, capture: true });
look();
});
"""


class LateLibraries:
    """Answers with the given modules in the place of Gradio's files of the same names."""

    def __init__(self, app: ASGIApp, modules: Mapping[str, str]) -> None:
        self.app = app
        self.modules = modules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path"].rpartition("/assets/")[2] if scope["type"] == "http" else ""
        if name in self.modules and scope["query_string"].decode() != WHOLE:
            await Response(self.modules[name], media_type="text/javascript")(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def write_modules(assets: Path = ASSETS) -> dict[str, str]:
    """Return modules by the names of the files that they take the place of; a file that is not known stays as it is."""
    never = {path.name: NEVER + _export(dict.fromkeys(names, "none")) for path, names in _list(assets, "hls-*.js")}
    return never | {path.name: _postpone(path.name, names) for path, names in _list(assets, *_find_late(assets))}


def _find_late(assets: Path) -> list[str]:
    """Return the names of the files that may come later."""
    cores = "".join(path.read_text(encoding="utf-8") for path in assets.glob("core-*.js"))
    found = [re.search(rf"\b{each}:\{{.*?component:.*?import\(`\./(.*?)`\)", cores) for each in COMPONENTS]
    editors = [path.name for path in assets.glob("dist-*.js") if EDITOR in path.read_text(encoding="utf-8")]
    return [*LIBRARIES, *editors, *(each[1] for each in found if each)]


def _list(assets: Path, *patterns: str) -> Iterator[tuple[Path, list[str]]]:
    """Yield the files of these names with what they export."""
    for path in itertools.chain.from_iterable(map(assets.glob, patterns)):
        if found := EXPORTS.search(path.read_text(encoding="utf-8")):
            yield path, [each.split(" as ")[-1].strip() for each in found[1].split(",")]


def _postpone(name: str, names: list[str]) -> str:
    values = {each: f"e{at}" for at, each in enumerate(names)}
    taken = "".join(f"const {value} = whole.{each};\n" for each, value in values.items())
    return f'{LATER}const whole = await import("./{name}?{WHOLE}");\n{taken}{_export(values)}'


def _export(values: Mapping[str, str]) -> str:
    return f"export {{ {', '.join(f'{value} as {name}' for name, value in values.items())} }};\n"
