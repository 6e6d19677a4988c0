"""Sites: which Host and Origin a request may name. It guards a server that nothing else guards.

A browser on this machine also shows pages of strangers. Such a page can point a name of its own at 127.0.0.1 (DNS
rebinding) and read what it asks here, but then the name is the Host. Or it sends a form whose answer it cannot read,
but then it is the Origin. Addresses need no check: nobody can point them elsewhere. Programs that are no browser
name what they like; they are on this machine already.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from app.api.errors import ApiError

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
MAX_SHOWN = 100


class Sites:
    """The names under which a server may be asked, beside localhost and addresses.

    Args:
        names: hosts without a port.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = frozenset(name.lower() for name in names)

    def check(self, method: str, host: str, origin: str) -> None:
        """Refuse a request that another site had a browser send.

        Args:
            host, origin: what the headers say; empty: they are not there.

        Raises:
            ApiError: 403 naming the header and how to allow what it says.
        """
        if host and not self._knows(f"//{host}"):
            raise _refusal("Host", host)
        # extensions and desktop apps have origins, too, under schemes of their own
        is_page = origin == "null" or origin.lower().startswith(("http://", "https://"))
        if is_page and method not in SAFE_METHODS and not self._knows(origin):
            raise _refusal("Origin", origin)

    def _knows(self, url: str) -> bool:
        try:
            name = (urlsplit(url).hostname or "").rstrip(".")
        except ValueError:
            return False
        if name in self.names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


def _refusal(header: str, value: str) -> ApiError:
    message = (
        f"{header} {value[:MAX_SHOWN]!r} is not this server, which has no key and answers this machine alone; "
        "ask it as localhost, allow the name with --allowed-host, or set --api-key"
    )
    return ApiError(403, message, code="site_not_allowed")
