"""Visit: one HTTP request from the gate to its last byte, and the line that the log gets of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine import RequestOutput


@dataclass(slots=True)
class Visit:
    """What is known of a request; the gate opens it, a Call fills it in.

    Attributes:
        key_number: which of the configured keys it came with, counted from 1; 0 without keys.
    """

    request_id: str
    key_number: int = 0
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    model: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)

    def note(self, output: RequestOutput) -> None:
        """Take in an output of the engine: a delta, or a whole one."""
        for choice in output.outputs:
            self.num_output_tokens += len(choice.token_ids)
            if choice.finish_reason is not None:
                self.finish_reasons.append(choice.finish_reason)
        if output.finished:
            self.num_prompt_tokens += len(output.prompt_token_ids)
            self.num_cached_tokens += output.num_cached_tokens
            self.ttft_s = output.metrics.ttft

    def describe(self, method: str, path: str) -> str:
        """The line: words a person reads, `name=value` pairs a program reads; never a prompt or a key."""
        parts = [f"{method} {path} {self.status or 'closed'}", f"id={self.request_id}"]
        if self.key_number:
            parts.append(f"key={self.key_number}")
        if self.model:
            parts.append(f"model={self.model}")
            parts.append(f"prompt_tokens={self.num_prompt_tokens} cached_tokens={self.num_cached_tokens}")
            parts.append(f"output_tokens={self.num_output_tokens}")
            parts.append(f"finish={','.join(self.finish_reasons) or 'none'}")
        if self.ttft_s is not None:
            parts.append(f"ttft_ms={self.ttft_s * 1000:.1f}")
        parts.append(f"total_ms={(time.monotonic() - self.started) * 1000:.1f}")
        return " ".join(parts)
