"""The text of a PDF: `python pdf_text.py MAX_PAGES MAX_CHARS MAX_SECONDS` reads the file from stdin.

It is a process of its own because a damaged file can keep pypdf busy forever, and Python cannot end a thread. It
imports nothing but pypdf, so that it starts fast. It writes {"pages": [text, ...]} or {"refused": reason} as JSON;
whatever damaged files raise inside pypdf ends it with a traceback.
"""

from __future__ import annotations

import io
import json
import logging
import signal
import sys
from typing import Any

import pypdf


def read_pages(data: bytes, max_pages: int, max_chars: int) -> dict[str, Any]:
    """The text of each page, or the reason why the file is refused."""
    reader = pypdf.PdfReader(io.BytesIO(data))
    try:
        num_pages = len(reader.pages)
        if num_pages > max_pages:
            return {"refused": f"has {num_pages:,} pages; at most {max_pages:,} are read: split it"}
        pages, num_chars = [], 0
        for page in reader.pages:
            pages.append(page.extract_text())
            num_chars += len(pages[-1])
            if num_chars > max_chars:
                return {"refused": f"has more than {max_chars:,} characters of text: split it"}
    except pypdf.errors.FileNotDecryptedError:
        return {"refused": "is locked with a password; save it without one first"}
    except pypdf.errors.DependencyError as error:
        if b"/Encrypt" not in data:
            raise
        reason = f"is encrypted in a way that is not read here ({error}); save it without encryption first"
        return {"refused": reason}
    return {"pages": pages}


if __name__ == "__main__":
    max_pages, max_chars, max_seconds = map(int, sys.argv[1:])
    # The server ends this process in time; the alarm does when the server itself was killed.
    signal.alarm(max_seconds)
    # The parent reads the last line of stderr: the error, not pypdf's remarks on every oddity of a file.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    json.dump(read_pages(sys.stdin.buffer.read(), max_pages, max_chars), sys.stdout)
