"""The page's Content-Security-Policy: a browser loads nothing from, and sends nothing to, another host for it."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Gradio's page has inline scripts and styles, and makes functions of the scripts of custom components and events.
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "media-src 'self' data: blob:",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
    )
)


class PagePolicy:
    """Sends the policy with every response of the page and its files."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (b"content-security-policy", POLICY.encode())
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self.app(scope, receive, send_with_policy)
