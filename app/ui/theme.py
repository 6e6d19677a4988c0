"""The look of the app: neutral slate, one teal accent, fonts that ship with Gradio: no other host is contacted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.ui.late import LateLibraries, write_modules

STYLE_SHEET = Path(__file__).resolve().parents[2] / "assets" / "style.css"

# polish.js loads the font files of the first name in each list.
SANS = ("IBM Plex Sans", "ui-sans-serif", "system-ui", "sans-serif")
MONO = ("IBM Plex Mono", "ui-monospace", "monospace")

# Slate surfaces, thin borders, no shadows. Only buttons, links and other controls have the accent colour.
SURFACES = {
    "body_background_fill": "*neutral_50", "body_background_fill_dark": "#0b1120",
    "background_fill_primary_dark": "#0f172a", "background_fill_secondary_dark": "#111a2e",
    "block_background_fill": "white", "block_background_fill_dark": "#0f172a", "block_border_width": "1px",
    "block_border_color_dark": "#1e293b", "border_color_primary": "*neutral_200",
    "border_color_primary_dark": "#1e293b", "block_shadow": "none", "block_label_background_fill": "transparent",
    "block_label_background_fill_dark": "transparent", "block_label_border_width": "0px",
    "block_label_text_color": "*neutral_500", "block_title_text_weight": "500", "block_title_text_size": "*text_sm",
    "input_background_fill": "*neutral_50", "input_background_fill_dark": "#0b1120",
    "input_border_color_dark": "#1e293b", "button_primary_background_fill": "*primary_700",
    "button_primary_background_fill_hover": "*primary_800", "button_primary_background_fill_dark": "*primary_700",
    "button_primary_background_fill_hover_dark": "*primary_800", "button_primary_text_color": "white",
    "button_secondary_background_fill": "white", "button_secondary_background_fill_dark": "#111a2e",
    "button_secondary_border_color": "*neutral_200", "button_secondary_border_color_dark": "#26334a",
    "color_accent_soft": "*primary_50", "color_accent_soft_dark": "#10302f", "slider_color": "*primary_600",
}
# A browser loads nothing from, and sends nothing to, another host for the page. Gradio's page has inline scripts and
# styles, and makes functions of the scripts of custom components and events.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; media-src 'self' data: blob:; connect-src 'self'; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)

# Files of these types get no policy header, because a browser never shows them as documents. On 130 files, the header
# was 50 kB of a first visit.
NO_DOCUMENTS = (b"text/css", b"text/javascript", b"application/json", b"text/event-stream")

HOW_TO_ALLOW = "--frame-ancestor https://SITE allows that site to show it"
logger = logging.getLogger("troupe.page")


class PagePolicy:
    """Sends the policy with the page, and with every file that a browser may show as a document.

    Args:
        frame_ancestors: sites that may show the page in a frame. Any other could lay it under its own buttons.
    """

    def __init__(self, app: ASGIApp, frame_ancestors: Sequence[str]) -> None:
        self.app = app
        self.is_explained = bool(frame_ancestors)
        self.policy = " ".join([POLICY, *frame_ancestors]).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.is_explained and scope["type"] == "http":
            headers = dict(scope["headers"])
            if headers.get(b"sec-fetch-dest") == b"iframe" and headers.get(b"sec-fetch-site") == b"cross-site":
                self.is_explained = True
                logger.warning("the page was opened in a frame of another site, which it refuses; %s", HOW_TO_ALLOW)

        async def send_with_policy(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start and not dict(message.get("headers", ())).get(b"content-type", b"").startswith(NO_DOCUMENTS):
                header = (b"content-security-policy", self.policy)
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self.app(scope, receive, send_with_policy)


def make_theme() -> gr.themes.Base:
    """The theme of every page."""
    theme = gr.themes.Base(
        primary_hue="teal", secondary_hue="slate", neutral_hue="slate", font=SANS, font_mono=MONO,
        radius_size="md", text_size="md", spacing_size="sm",
    )
    return theme.set(**SURFACES)


def mount_options(frame_ancestors: Sequence[str] = ()) -> dict[str, Any]:
    """Arguments for `gr.mount_gradio_app` besides the app and the path."""
    return {
        "theme": make_theme(),
        "css_paths": [STYLE_SHEET],
        "footer_links": [],
        # The browser keeps no history of runs, because pasted texts may be private.
        "run_history": False,
        "enable_monitoring": False,
        "ssr_mode": False,
        "show_error": True,
        "app_kwargs": {
            "middleware": [
                Middleware(PagePolicy, frame_ancestors=frame_ancestors),
                Middleware(LateLibraries, modules=write_modules()),
                # Gradio compresses its files, but neither the page nor its configuration, which are half a megabyte.
                Middleware(GZipMiddleware, minimum_size=1024),
            ]
        },
    }
