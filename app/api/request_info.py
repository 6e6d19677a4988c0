"""RequestInfo: one HTTP request from the gate to its last byte, and the line that the log gets of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine import RequestOutput


@dataclass(slots=True)
class RequestInfo:
    """The facts of one request; the gate opens it, a Call fills it in.

    Attributes:
        key_number: which of the configured keys it came with, counted from 1; 0 without keys.
        owner: whose objects of the store it sees.
        counts_output: whether what is drawn is in the reply; a prompt that is only scored draws one token for nothing.
        prompts: id of a request of the engine -> tokens of its prompt, and how many of them were found in the cache.
        warnings: the parts of the request that the answer leaves out, for a header of the response.
        ttft_s: time to the first token of whichever of them had one first.
    """

    request_id: str
    key_number: int = 0
    owner: str = ""
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    model: str = ""
    warnings: list[str] = field(default_factory=list)
    counts_output: bool = True
    prompts: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_output_tokens: int = 0
    ttft_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)

    def note(self, output: RequestOutput) -> None:
        """Take in an output of the engine: a delta, or a whole one."""
        self.prompts[output.request_id] = (len(output.prompt_token_ids), output.num_cached_tokens)
        if self.ttft_s is None:
            self.ttft_s = output.metrics.ttft
        for choice in output.outputs:
            self.num_output_tokens += len(choice.token_ids) if self.counts_output else 0
            if choice.finish_reason is not None:
                self.finish_reasons.append(choice.finish_reason)

    def count(self, num_prompt: int, num_output: int, num_cached: int) -> None:
        """Add the tokens of requests whose outputs are not seen here."""
        self.prompts[str(len(self.prompts))] = (num_prompt, num_cached)
        self.num_output_tokens += num_output

    def describe(self, method: str, path: str) -> str:
        """Return the line: text for people and `name=value` pairs for programs, never a prompt or a key."""
        parts = [f"{method} {path} {self.status or 'closed'}", f"id={self.request_id}"]
        if self.key_number:
            parts.append(f"key={self.key_number}")
        if self.model:
            parts.append(f"model={self.model}")
            num_tokens, num_cached = (
                sum(counts) for counts in zip((0, 0), *self.prompts.values(), strict=True)
            )
            parts.append(f"prompt_tokens={num_tokens} cached_tokens={num_cached}")
            parts.append(f"output_tokens={self.num_output_tokens}")
            parts.append(f"finish={','.join(self.finish_reasons) or 'none'}")
        if self.ttft_s is not None:
            parts.append(f"ttft_ms={self.ttft_s * 1000:.1f}")
        parts.append(f"total_ms={(time.monotonic() - self.started) * 1000:.1f}")
        return " ".join(parts)
