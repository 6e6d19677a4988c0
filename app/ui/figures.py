"""The figures of one output: the line under it."""

from __future__ import annotations

from engine import RequestOutput

FINISH_WORDS = {
    "stop": "complete", "length": "cut off at the token limit", "abort": "stopped", "error": "failed",
    "dead_end": "the grammar allowed no further token",
}


def describe_output(output: RequestOutput) -> str:
    """The figures of one answer, as one line."""
    completion = output.outputs[0]
    num_tokens = len(completion.token_ids)
    num_prompt = len(output.prompt_token_ids)
    parts = []
    if output.metrics.ttft is not None:
        parts.append(f"first token {format_seconds(output.metrics.ttft)}")
    rate = output.metrics.tokens_per_second(num_tokens)
    if rate is not None:
        parts.append(f"{rate:,.0f} tok/s")
    parts.append(f"{num_tokens:,} token{'s' * (num_tokens != 1)}")
    if num_prompt:
        parts.append(f"prompt {num_prompt:,}, {output.num_cached_tokens / num_prompt:.0%} cached")
    if output.grammar is not None:
        parts.append(f"grammar by {output.grammar.backend}")
    if completion.finish_reason is not None:
        parts.append(FINISH_WORDS.get(completion.finish_reason, completion.finish_reason))
    return " · ".join(parts)


def format_seconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"
