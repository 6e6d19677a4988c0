"""The page that asks a browser for an API key, and the cookie that carries it, in place of the browser's own dialog."""

from __future__ import annotations

from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, quote, unquote_to_bytes

from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Receive

KEY_PATH = "/key"
COOKIE = "troupe-key"
MAX_FORM_BYTES = 4096
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Troupe: API key</title><style>
:root {{ color-scheme: light dark; --ground: #f8fafc; --ink: #0f172a; --muted: #475569; --line: #cbd5e1;
  --bad: #b91c1c; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ground: #0b1120; --ink: #e2e8f0; --muted: #94a3b8; --line: #334155; --bad: #fca5a5; }} }}
body {{ display: grid; min-height: 100dvh; margin: 0; padding: 24px; place-items: center; box-sizing: border-box;
  background: var(--ground); color: var(--ink); font: 15px/1.5 ui-sans-serif, system-ui, sans-serif; }}
form {{ display: grid; gap: 12px; width: min(360px, 100%); }} h1 {{ margin: 0; font-size: 20px; }} p {{ margin: 0; }}
p {{ color: var(--muted); }} .wrong {{ color: var(--bad); }}
input, button {{ height: 44px; padding: 0 12px; border: 1px solid var(--line); border-radius: 8px; font: inherit; }}
button {{ border-color: #0f766e; background: #0f766e; color: #fff; font-weight: 600; cursor: pointer; }}
</style></head><body><main><form method="post" action="key">
<h1>Troupe</h1><p>This server asks for an API key. Whoever runs it can give you one.</p>
<label for="key">API key</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
{note}<button>Open</button></form></main></body></html>"""


def wants_page(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a person waits for a page, not a program for an answer."""
    return method == "GET" and b"text/html" in headers.get(b"accept", b"")


def ask_for_key(is_wrong: bool) -> Response:
    note = '<p class="wrong" role="alert">This key is wrong. Try again.</p>' if is_wrong else ""
    return HTMLResponse(PAGE.format(note=note), 401, {"Cache-Control": "no-store"})


async def read_form(receive: Receive) -> bytes:
    """Return the key in the body of the page's form; b"" where there is none."""
    body, has_more = b"", True
    while has_more and len(body) <= MAX_FORM_BYTES:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    if len(body) > MAX_FORM_BYTES:
        return b""
    return parse_qs(body).get(b"key", [b""])[0].strip()


def let_in(key: bytes, is_secure: bool) -> Response:
    """Return the way to the page, with the key in a cookie that only this site's own pages send."""
    response = RedirectResponse("./", 303)
    response.set_cookie(COOKIE, quote(key), httponly=True, samesite="strict", secure=is_secure)
    return response


def read_cookie(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the key that the browser keeps; b"" without one."""
    try:
        found = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(COOKIE)
    except CookieError:
        return b""
    return unquote_to_bytes(found.value) if found else b""
