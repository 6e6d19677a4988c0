"""`python -m app replay FILE --request ID`: compute a request of a journal again, and compare the answers."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from app.concurrency import take_last
from app.config import Failure, UsageError
from engine import ConfigError, Engine, LoRARequest, RecordedRequest, RequestOutput, read_journal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the journal, the request, and the model's present location."""
    parser.add_argument("journal", metavar="FILE", help="journal, as written by serve --journal FILE")
    parser.add_argument(
        "--request", metavar="ID", help="id of the request or its beginning; default: list all requests"
    )
    parser.add_argument("--model", help="folder or hub name, if the model has moved")


def run(arguments: argparse.Namespace, start: float) -> int:
    """Write the text to stdout as it was sent, or one JSON object per completion if there are several.

    Raises:
        UsageError: the journal or the request cannot be read.
        Failure: the answer differs from the recorded one.
    """
    try:
        requests = read_journal(arguments.journal)
        if arguments.request is None:
            print("\n".join(describe(each) for each in requests))
            return 0
        request = find_request(requests, arguments.request)
        output = asyncio.run(compute_again(request, arguments.model or request.config.model))
    except ConfigError as error:
        raise UsageError(str(error)) from error
    if len(output.outputs) == 1:
        sys.stdout.write(output.outputs[0].text)
    else:
        for each in output.outputs:
            print(json.dumps({"index": each.index, "text": each.text, "finish_reason": each.finish_reason}))
    sys.stdout.flush()
    compare(request, output)
    return 0


def describe(request: RecordedRequest) -> str:
    """Return one line: time, id, tokens, finish reason."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(request.time))
    num_tokens = sum(len(end.token_ids) for end in request.ends.values())
    reasons = ",".join(end.finish_reason for end in request.ends.values()) or "unfinished"
    num_prompt = len(request.message.prompt_token_ids)
    return f"{when}  {request.message.request_id}  {num_prompt} + {num_tokens} tokens  {reasons}"


def find_request(requests: Sequence[RecordedRequest], name: str) -> RecordedRequest:
    """Return the latest request with this id, or the only one whose id begins so."""
    exact = [each for each in requests if each.message.request_id == name]
    found = exact or [each for each in requests if each.message.request_id.startswith(name)]
    if not found:
        raise UsageError(f"--request {name!r}: the journal has no such request among its {len(requests)}")
    if len(found) > 1 and not exact:
        ids = ", ".join(each.message.request_id for each in found[:5])
        raise UsageError(f"--request {name!r} fits {len(found)} requests, such as {ids}")
    return found[-1]


async def compute_again(request: RecordedRequest, model: str) -> RequestOutput:
    """Run the request with its seeds on one core with the recorded settings."""
    config = replace(
        request.config, model=model, core="local", data_parallel_size=1, data_parallel_size_local=None, journal=None
    )
    message, adapter = request.message, request.message.adapter
    params = replace(message.params, seed=message.completions[0].seed, output_kind="final")
    generated = [each.generated_token_ids for each in message.completions]
    async with Engine(config) as engine:
        (replica,) = engine.describe_replicas()
        if replica.fingerprint != request.fingerprint:
            print("troupe: weights, dtype or kernels differ from those of the journal", file=sys.stderr)
        stream = engine.generate(
            {"prompt_token_ids": request.prompt}, params, message.request_id, cache_salt=message.cache_salt,
            generated_token_ids=generated if any(generated) else (),
            lora_request=None if adapter is None else LoRARequest(adapter.name, lora_path=adapter.path),
        )
        return await take_last(stream)


def compare(request: RecordedRequest, output: RequestOutput) -> None:
    """Compare the tokens as far as both go: a recorded answer may have been aborted."""
    for completion, each in zip(request.message.completions, output.outputs, strict=True):
        if (end := request.ends.get(completion.handle)) is None:
            continue
        recorded = end.token_ids[len(completion.generated_token_ids) :]
        length = min(len(recorded), len(each.token_ids))
        is_whole = end.finish_reason in ("abort", "error") or each.finish_reason == end.finish_reason
        if recorded[:length] != each.token_ids[:length] or not is_whole:
            raise Failure(f"completion {each.index} differs from the journal")
