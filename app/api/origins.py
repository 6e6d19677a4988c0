"""AllowedOrigins: which Origin and Host headers a request may carry. It rejects requests from pages of other sites.

Cross-site request forgery: a page sends a form whose answer it cannot read, and the browser adds the credentials that
it has stored. Every request that may change something is checked by its Origin, with keys or without.
DNS rebinding: a page points its own name at 127.0.0.1 and reads the answers. A server on loopback without keys
checks the name in the Host as well; an address needs no check there, since a page cannot point it elsewhere.

Cross-origin sharing (CORS): `--allowed-origin` names pages that may use the API with a key of theirs. Browsers send
them no stored credentials.

Programs other than browsers send no Origin and are served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.responses import Response

from app.api.errors import ApiError

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_SHOWN = 100
EXPOSED = "x-request-id, request-id, x-troupe-warning, Retry-After"


class AllowedOrigins:
    """The names under which browsers may use the server, beside localhost and the name in the Host header.

    Args:
        names: hosts without a port.
        checks_host: whether the Host must be one of the names, localhost or an address.
        shared: origins whose pages may use the API and read its answers (CORS); * is any.
    """

    def __init__(self, names: Iterable[str] = (), checks_host: bool = True, shared: Iterable[str] = ()) -> None:
        self.names = frozenset(name.lower() for name in names)
        self.checks_host = checks_host
        self.shared = frozenset(origin.lower().rstrip("/") for origin in shared)

    def make_cors_headers(self, headers: Mapping[bytes, bytes]) -> dict[str, str]:
        """Return the headers by which a browser lets the page of a shared origin read the answer."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or not ("*" in self.shared or origin.lower() in self.shared):
            return {}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", "Access-Control-Expose-Headers": EXPOSED}

    def answer_preflight(self, headers: Mapping[bytes, bytes]) -> Response:
        """Answer a preflight request: whether a page of another origin may send a request."""
        cors = self.make_cors_headers(headers)
        if not cors:
            origin = headers.get(b"origin", b"").decode("latin-1")
            message = f"pages of {origin[:MAX_SHOWN]!r} may not use this API; --allowed-origin allows them"
            raise ApiError(403, message, code="origin_not_allowed")
        asked = headers.get(b"access-control-request-headers", b"").decode("latin-1")
        return Response(
            status_code=204,
            headers={"Access-Control-Allow-Methods": "GET, POST, DELETE", "Access-Control-Allow-Headers": asked}
            | {"Access-Control-Max-Age": "600"},
        )

    def check(self, method: str, headers: Mapping[bytes, bytes], scheme: str = "http") -> None:
        """Reject a request that a page of another site had a browser send.

        Args:
            scheme: how the request came; in front of a proxy it may have been https all the same.
        """
        host, origin, fetch_site = (
            headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin", b"sec-fetch-site")
        )
        host_name = _read_name(f"//{host}")
        if self.checks_host and host and not (self._knows(host_name) or _read_address(host_name)):
            raise _refusal("Host", host)
        # A page cannot set Sec-Fetch-Site; it is right also behind a proxy that puts its own name into the Host.
        if method in SAFE_METHODS or fetch_site in ("same-origin", "none"):
            return
        if self.make_cors_headers(headers):
            return
        # browser extensions and desktop apps have origins with their own schemes
        is_page = origin == "null" or origin.lower().startswith(("http://", "https://"))
        if is_page and not self._is_own(origin, host, scheme):
            raise _refusal("Origin", origin)

    def _is_own(self, origin: str, host: str, scheme: str) -> bool:
        """Return whether a page is of this server: the scheme, the name and the port of its origin are the server's."""
        name, kind = _read_name(origin), origin.partition(":")[0].lower()
        if not name or (scheme == "https" and kind != "https"):
            return False
        if _read_port(origin) == _read_port(f"{kind}://{host}"):
            return name == _read_name(f"//{host}") or self._knows(name)
        # a proxy may put a name and a port of its own into the Host header
        return name in self.names and _read_port(origin) == DEFAULT_PORTS[kind]

    def _knows(self, name: str) -> bool:
        address = _read_address(name)
        if address is not None and address.is_loopback:
            return True
        return name in self.names or name == "localhost" or name.endswith(".localhost")


def _read_name(url: str) -> str:
    """Return the host of a URL in lower case; empty if there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _read_port(url: str) -> int | None:
    """Return the port of a URL, by default that of its scheme; None if it is malformed."""
    try:
        parts = urlsplit(url)
        return parts.port or DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return None


def _read_address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _refusal(header: str, value: str) -> ApiError:
    message = (
        f"{header} {value[:MAX_SHOWN]!r} is not a name of this server; open it under its own name, "
        "or allow this one with --allowed-host"
    )
    return ApiError(403, message, code="origin_not_allowed")
