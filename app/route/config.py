"""RouteConfig: the settings of `route` beside those of a server (AppConfig)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.config import UsageError, check_key, read_url, setting

RoutePolicy = Literal["prefix_aware", "least_load", "power_of_two", "round_robin", "consistent_hashing"]


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """Which servers get the requests, and how one of them is chosen.

    Raises:
        UsageError: a value outside its range.
    """

    worker_urls: tuple[str, ...] = setting(
        (), "addresses of OpenAI-compatible servers, with or without /v1", takes_several=True
    )
    policy: RoutePolicy = setting("prefix_aware", "how a worker is chosen")
    worker_api_key: str | None = setting(
        None, "key that the workers want; without it, and without --api-key, clients' keys are passed on"
    )
    health_interval_s: float = setting(2.0, "seconds between two probes of a worker")
    worker_timeout_s: float = setting(600.0, "a worker that sends nothing for so many seconds has failed")

    def __post_init__(self) -> None:
        if not self.worker_urls:
            raise UsageError("route needs --worker-urls URL ...")
        urls = [read_url("--worker-urls", url) for url in self.worker_urls]
        if len(set(urls)) < len(urls):
            raise UsageError("--worker-urls names a server twice")
        for name in ("health_interval_s", "worker_timeout_s"):
            if not 0.05 <= getattr(self, name) <= 86400:
                raise UsageError(f"{name}={getattr(self, name)} must be a number from 0.05 to 86400")
        if self.worker_api_key is not None:
            check_key("worker_api_key", self.worker_api_key)
