"""Ten leases of 5 s for 40 requests of 20 s: `python -m tests.measure.zero_gpu`.

The real package `spaces`, with a device API on loopback and a CPU core in place of CUDA (tests/app/zero_gpu/space.py).
Every text must equal that of an undisturbed run, and none may be lost.
"""

import argparse
import asyncio
import time

from tests.app.zero_gpu.harness import run_space, write_alone

END_S = 2  # before the end of a call, when its core stops


async def measure(lease_s: int, num_requests: int, length: int) -> bool:
    async with run_space(lease_s + END_S, "--max-num-seqs", "16") as space:
        begin = time.monotonic()

        async def write(number: int) -> tuple[str, float]:
            return await space.write(number, length, f"visitor-{number}"), time.monotonic() - begin

        found = await asyncio.gather(*map(write, range(num_requests)))
        visitors = space.list_events("scheduled")
        num_killed = len(space.list_events("killed"))
    alone = await write_alone(range(num_requests), length)
    num_equal = sum(text == expected for (text, _), expected in zip(found, alone, strict=True))
    times = sorted(seconds for _, seconds in found)
    print(
        f"{num_requests} requests of {length} tokens, {times[0]:.0f} to {times[-1]:.0f} s: {len(visitors)} leases of "
        f"{lease_s} s by {len(set(visitors))} visitors, {num_killed} killed; {num_equal} texts equal"
    )
    return num_equal == num_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lease-s", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--length", type=int, default=900, help="tokens; with 15 others at a time they take about 20 s")
    args = parser.parse_args()
    if not asyncio.run(measure(args.lease_s, args.requests, args.length)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
