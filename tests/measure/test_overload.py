"""What overload leaves behind on a server: nothing; and what the tool says of it."""

import pytest

from app.bench.client import Record
from tests.measure.overload import Phase, Result, Size, describe, run


@pytest.mark.soak
async def test_a_crowd_a_storm_and_a_slow_reader_leave_nothing_behind() -> None:
    size = Size(4, 4, num_clients=16, seconds=1.0, num_aborts=60, abort_rate=60.0)
    result = await run(size, ["--mock-step-ms", "5", "--num-blocks", "512"])
    assert (result.full.failed, result.overload.failed, result.storm.failed) == ([], [], [])
    assert min(len(phase.admitted) for phase in (result.full, result.overload, result.storm)) >= 1
    assert result.overload.refused_s
    assert result.num_lost_blocks == 0
    assert len(result.describe()) == 4


def test_a_line_compares_with_the_full_phase() -> None:
    phase = Phase([Record(3, itls=[0.02, 0.02])], [0.001], [], [2**20, 2**20, 2**21], seconds=2.0, cpu_s=1.0)
    line = describe("overload", phase, base=0.01)
    assert "1 admitted and finished in 2 s, 0 failed" in line and "event loop ran 50%" in line
    assert "p99 20.0 ms (2.00x)" in line and "1 refused, after p50 1.0 ms" in line
    assert "RSS 1 MiB in the first third, 2 in the last" in line


def test_blocks_that_are_not_freed_are_reported() -> None:
    phase = Phase([Record(3, itls=[0.02])], seconds=1.0)
    assert Result(phase, phase, phase, 3).describe()[-1] == "empty: 3 blocks are not free"
