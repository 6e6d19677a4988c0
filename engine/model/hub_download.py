"""Downloads the files of a model from the hub into its cache, going on where an earlier download was cut off.

huggingface_hub begins a file anew in every process. Here a file grows under `blobs/` as ETAG.part; when it is complete
and its checksum right, it gets the name under which huggingface_hub finds it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers, get_session, tqdm

from engine.errors import ConfigError
from engine.packaged_models import Progress, check_disk, locked

_SHA256 = re.compile(r"[0-9a-f]{64}")  # etag of a large file; a small one has git's hash


def download_files(repository: str, patterns: Sequence[str], report: Progress) -> None:
    """Download the files of a repository that match.

    Raises:
        ConfigError: the hub refuses, the connection breaks, the disk is full, or a checksum is wrong.
    """
    repo_id, _, revision = repository.partition("@")
    find = partial(
        snapshot_download, repo_id, revision=revision or None, allow_patterns=list(patterns), tqdm_class=_Silent
    )
    try:
        plan: Any = find(dry_run=True)
        missing = [each for each in plan if each.will_download]
        total = sum(each.file_size or 0 for each in missing)
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="model") / "blobs"
        folder.mkdir(parents=True, exist_ok=True)
        check_disk(folder, total - sum(path.stat().st_size for path in folder.glob("*.part")), repository)
        done = 0
        for each in missing:
            url = hf_hub_url(repo_id, each.filename, revision=each.commit_hash)
            _download(url, folder, lambda num_bytes, before=done: report(before + num_bytes, total))  # type: ignore[misc]
            done += each.file_size or 0
        find()  # gives the files their names
    except HFValidationError as error:
        raise ConfigError(f"model {repository!r} is no name of the hub: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(f"model {repository!r} cannot be fetched: the hub cannot be reached") from error
    except (HTTPError, OSError) as error:
        raise ConfigError(f"model {repository!r} cannot be fetched: {error}; the same command goes on") from error


class _Silent(tqdm):  # type: ignore[misc]
    """A progress bar that is not drawn."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"disable": True})


def _download(url: str, folder: Path, report: Callable[[int], None]) -> None:
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    facts = get_hf_file_metadata(url, headers=headers)
    if facts.etag is None:
        raise ConfigError(f"{url} has no etag, by which its file is named")
    target, part = folder / facts.etag, folder / f"{facts.etag}.part"
    with locked(target):
        start = part.stat().st_size if part.is_file() else 0
        if facts.size is None or start < facts.size:
            ranged = headers | ({"Range": f"bytes={start}-"} if start else {})
            with get_session().stream("GET", url, headers=ranged, follow_redirects=True) as answer:
                answer.raise_for_status()
                is_rest = answer.status_code == 206
                with part.open("ab" if is_rest else "wb") as file:
                    for piece in answer.iter_raw():
                        file.write(piece)
                        report(file.tell())
        _check(part, facts.etag, facts.size, url)
        part.replace(target)


def _check(part: Path, etag: str, size: int | None, url: str) -> None:
    num_bytes = part.stat().st_size
    if size is not None and num_bytes < size:
        raise ConnectionError(f"{url} ended after {num_bytes} of {size} bytes")
    if _SHA256.fullmatch(etag):
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != etag:
            part.unlink()
            raise ConfigError(f"{url} has the checksum {found}, not {etag}; what was fetched is deleted")
