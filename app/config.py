"""AppConfig, and how the fields of any config dataclass become command-line flags.

dataclass field ── default ── TROUPE_<FIELD> ── --flag        the right-most one that is set wins

A field is annotated with its help text; before it "-x" and "--other" are further flags, and "+" lets the flag take
several values.

The parser rejects unknown flags, app/cli/variables.py unknown TROUPE_ variables.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from grammar import list_tool_styles

Config = TypeVar("Config")

ENV_PREFIX = "TROUPE_"
TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")
# Value that Kubernetes gives TROUPE_PORT in every container beside a service named "troupe".
SERVICE_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://")

SITE = re.compile(r"https?://(\*\.)?[a-z0-9.-]+(:\d+)?", re.IGNORECASE)
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", re.IGNORECASE)
LogLevel = Literal["debug", "info", "warning", "error"]


class UsageError(ValueError):
    """An invalid flag, variable or file; the message is one line."""


class Failure(Exception):
    """An error that is not the user's mistake; reported in one line, with exit code 1."""


@dataclass(frozen=True, slots=True)
class AppConfig:
    """Settings of the web server; the engine has its own.

    Raises UsageError: a value outside its range.
    """

    host: Annotated[str, "address to listen on; 0.0.0.0: every interface"] = "127.0.0.1"
    port: Annotated[int, "port of the page and the API; 0 takes a free one"] = 7860
    api_key: Annotated[tuple[str, ...], "key that every request must carry; repeat it or use commas for several"] = ()
    allowed_host: Annotated[tuple[str, ...],
        "further Host header accepted from browsers, e.g. the name of a reverse proxy"] = ()
    allowed_origin: Annotated[tuple[str, ...],
        "web page that may use the API from a browser, such as https://app.example; * is any"] = ()
    frame_ancestor: Annotated[tuple[str, ...],
        "site that may show the page in a frame, such as https://app.example or https://*.hf.space"] = ()
    uds: Annotated[str | None, "path of a Unix domain socket to listen on instead of host and port"] = None
    ssl_certfile: Annotated[str | None, "certificate chain (PEM); the server then speaks HTTPS"] = None
    ssl_keyfile: Annotated[str | None, "private key of the certificate (PEM)"] = None
    admin_key: Annotated[str | None, "key of the admin routes, which are off without it"] = None
    max_requests_per_key: Annotated[int | None,
        "requests that each API key may have running or queued; more get a 429"] = None
    log_level: Annotated[LogLevel, "how much is logged to stderr"] = "info"
    max_body_bytes: Annotated[int, "largest request body"] = 32 * 2**20
    shutdown_grace_s: Annotated[float, "seconds that running requests may continue after a stop signal"] = 5.0
    tool_call_parser: Annotated[str | None,
        "how the model writes tool calls, e.g. hermes or qwen3_coder; default: as its chat template "
        "does"] = None
    data_dir: Annotated[str | None,
        "folder of chats, jobs, files and stored responses; none: keep them in memory; default: the user's data "
        "folder, ~/.local/share/troupe"] = None
    max_data_bytes: Annotated[int, "what is kept there at most; one browser or key may take a quarter"] = 4 * 2**30
    max_data_days: Annotated[float, "days after which what was not changed is deleted"] = 90.0
    models_dir: Annotated[str | None,
        "folder of further models, which requests may name; `troupe models` lists them"] = None
    model_alias: Annotated[tuple[str, ...], "+",
        "further name of a model, as NAME=MODEL; requests may name it, too"] = ()
    chat_model: Annotated[str,
        "model of the page's chat, and of requests without a model; none: that of --model; auto: smollm2 beside the "
        "embedded model, if it is here"] = "auto"
    extract_model: Annotated[str,
        "model of the page's extraction, and of /v1/extract without a model; none: that of --model; auto: the embedded "
        "model beside smollm2"] = "auto"
    max_loaded_models: Annotated[int, "models in memory at a time, the one of --model included"] = 3
    model_idle_s: Annotated[float,
        "seconds without a request after which a further model frees its KV cache; after ten times as many it is "
        "ended"] = 300.0
    headless: Annotated[bool,
        "serve no page and no API: run one replica for the front at --data-parallel-address"] = False
    zero_gpu: Annotated[bool,
        "on a Space with ZeroGPU: run the model in calls to which visitors' quotas lend a GPU"] = False
    ui: Annotated[bool, "serve the web page beside the API"] = True

    def __post_init__(self) -> None:
        check_range(self, "port", 0, 65535)
        check_range(self, "max_body_bytes", 1024, 2**31)
        check_range(self, "shutdown_grace_s", 0.0, 3600.0)
        check_range(self, "max_data_bytes", 2**20, 2**50)
        check_range(self, "max_data_days", 0.01, 36500.0)
        check_range(self, "max_loaded_models", 1, 256)
        check_range(self, "model_idle_s", 0.1, 10.0**7)
        if self.models_dir is not None and not Path(self.models_dir).expanduser().is_dir():
            raise UsageError(f"models_dir={self.models_dir!r} is not a folder")
        if len(self.read_aliases()) < len(self.model_alias):
            raise UsageError("model_alias has a name twice")
        if self.max_loaded_models == 1 and (self.models_dir or self.model_alias):
            raise UsageError("max_loaded_models=1 leaves no room for a further model; it must be at least 2")
        if self.data_dir == "":
            raise UsageError("data_dir must be a folder, or none to keep everything in memory")
        if self.tool_call_parser not in (None, *list_tool_styles()):
            raise UsageError(f"tool_call_parser {self.tool_call_parser!r} is none of {', '.join(list_tool_styles())}")
        if self.max_requests_per_key is not None:
            check_range(self, "max_requests_per_key", 1, 2**20)
            if not self.api_key:
                raise UsageError("max_requests_per_key needs api_key: clients are distinguished by their keys")
        for key in self.api_key:
            check_key("api_key", key)
        for origin in self.allowed_origin:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise UsageError(f"allowed_origin={origin!r} must be * or scheme://host[:port] without a path")
        for site in self.frame_ancestor:
            if not SITE.fullmatch(site):
                raise UsageError(f"frame_ancestor={site!r} must be scheme://host[:port]; a host may begin with *.")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise UsageError("ssl_certfile and ssl_keyfile go together")
        if self.admin_key is not None:
            check_key("admin_key", self.admin_key)

    def read_aliases(self) -> dict[str, str]:
        """Return the models of `model_alias` by name."""
        found = {}
        for entry in self.model_alias:
            name, _, model = entry.partition("=")
            if not name or not model:
                raise UsageError(f"model_alias={entry!r} must be NAME=MODEL")
            found[name] = model
        return found

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can reach the server."""
        return self.uds is not None or self.host in ("127.0.0.1", "localhost", "::1")


RoutePolicy = Literal["prefix_aware", "round_robin"]


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """The servers that get the requests, and the choice among them.

    Raises UsageError: a value outside its range.
    """

    worker_urls: Annotated[tuple[str, ...], "+", "addresses of OpenAI-compatible servers, with or without /v1"] = ()
    policy: Annotated[RoutePolicy, "how a worker is chosen"] = "prefix_aware"
    worker_api_key: Annotated[str | None,
        "key that the workers want; without it, and without --api-key, clients' keys are passed on"] = None

    def __post_init__(self) -> None:
        if not self.worker_urls:
            raise UsageError("route needs --worker-urls URL ...")
        urls = [read_url("--worker-urls", url) for url in self.worker_urls]
        if len(set(urls)) < len(urls):
            raise UsageError("--worker-urls names a server twice")
        if self.worker_api_key is not None:
            check_key("worker_api_key", self.worker_api_key)


def check_key(name: str, key: str) -> None:
    """Reject a key that a header cannot carry: spaces and characters beyond ASCII are not allowed."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"{name} must be printable ASCII without spaces")


def read_url(name: str, url: str) -> str:
    """Return a server's address without /v1, to which API paths are appended."""
    if not url.lower().startswith(("http://", "https://")):
        raise UsageError(f"{name} {url!r} needs http:// or https:// at its start")
    return url.rstrip("/").removesuffix("/v1")


def add_flags(parser: argparse.ArgumentParser, config_class: type, names: Collection[str] | None = None) -> None:
    """Add a flag for every field of a config dataclass, or for some; flags that are not given stay absent."""
    group = parser.add_argument_group(config_class.__name__.removesuffix("Config").lower() + " settings")
    hints = typing.get_type_hints(config_class, include_extras=True)
    for item in fields(config_class):
        if names is not None and item.name not in names:
            continue
        hint, *notes = typing.get_args(hints[item.name])
        others = [each for each in notes[:-1] if str(each).startswith("-")]
        flags = sorted(["--" + item.name.replace("_", "-"), *others], key=lambda flag: flag.startswith("--"))
        text = _make_help(item, notes[-1])
        kind = _plain_type(hint)
        options: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
        elif typing.get_origin(kind) is tuple:
            several: dict[str, Any] = {"action": "append"}
            if "+" in notes:
                several = {"action": "extend", "nargs": "+"}
            group.add_argument(*flags, metavar="TEXT", **several, **options)
        else:
            group.add_argument(*flags, type=_argument_type(kind), metavar=_metavar(kind), **options)
    for name in getattr(config_class, "other_names", ()):
        hidden: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        flag = name.replace("_", "-")
        group.add_argument(f"--{flag}", nargs="?", const=True, type=_read_json, **hidden)
        group.add_argument(f"--no-{flag}", action="store_const", const=False, **hidden)


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def make_config(
    config_class: type[Config], given: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Config:
    """Build a config from parsed flags over TROUPE_<FIELD> variables over the fields' defaults."""
    hints = typing.get_type_hints(config_class)
    names = getattr(config_class, "other_names", ())
    values: dict[str, Any] = {name: given[name] for name in names if name in given}
    for item in fields(config_class):  # type: ignore[arg-type]
        variable = ENV_PREFIX + item.name.upper()
        kind = _plain_type(hints[item.name])
        if item.name in given:
            values[item.name] = given[item.name]
        elif is_set(variable, environ):
            values[item.name] = _parse_variable(kind, variable, environ[variable])
        if typing.get_origin(kind) is tuple and item.name in values:
            values[item.name] = _split(values[item.name])
            if not values[item.name]:  # an empty value is an error: a lost key must not open the server
                raise UsageError(f"{item.name} is given without a value: name one, or leave it out")
    return config_class(**values)


def is_set(variable: str, environ: Mapping[str, str]) -> bool:
    """Return whether a variable is set for Troupe: not if it is empty, or a Kubernetes service address for the port."""
    text = environ.get(variable, "")
    is_address = variable == f"{ENV_PREFIX}PORT" and SERVICE_ADDRESS.match(text) is not None
    return text != "" and not is_address


def _parse_variable(kind: Any, variable: str, text: str) -> Any:
    try:
        return text if typing.get_origin(kind) is tuple else parse_value(kind, text)
    except UsageError as error:
        raise UsageError(f"{variable}={text!r}: {error}") from None


def parse_value(kind: Any, text: str) -> Any:
    """Turn a flag's text into a value of its field's type."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise UsageError(f"{text!r} is not one of {', '.join(choices)}")
        return text
    if kind is bool:
        word = text.strip().lower()
        if word not in TRUE_WORDS + FALSE_WORDS:
            raise UsageError(f"{text!r} is neither true nor false")
        return word in TRUE_WORDS
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise UsageError(f"{text!r} is not {'an integer' if kind is int else 'a number'}") from None
    return text


def _argument_type(kind: Any) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return parse_value(kind, text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _plain_type(hint: Any) -> Any:
    """Remove None from an optional field's type: an absent flag means None."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(part for part in typing.get_args(hint) if part is not types.NoneType)
    return hint


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(typing.get_args(kind)) + "}"
    return {int: "INT", float: "NUMBER"}.get(kind, "TEXT")


def _make_help(item: Field[Any], text: str) -> str:
    default = None if item.default is MISSING else item.default
    is_shown = default not in (None, "", ()) and "default" not in text
    # The demo model's default is a path of this installation, which does not help a reader.
    shown = "the embedded demo model" if item.name == "model" else default
    if isinstance(default, tuple):
        shown = ",".join(map(str, default))
    return f"{text} (default: {shown})".replace("%", "%%") if is_shown else text.replace("%", "%%")


def _split(values: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    texts = [values] if isinstance(values, str) else values
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


def check_range(config: object, name: str, low: float, high: float) -> None:
    """Raise a UsageError if a field is not a number within the range."""
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UsageError(f"{name}={value!r} must be a number from {low} to {high}")
