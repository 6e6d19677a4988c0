"""The engine inside other programs: any loop or thread, twice, abandoned, interrupted. It neither hangs nor leaks."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import LLM, Engine, EngineConfig, SamplingParams
from engine.core.actor_messages import DropMatchers
from tests.waiting import list_engine_threads, wait_until

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "hello world"
SHORT = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True, output_kind="delta")

MakeConfig = Callable[..., EngineConfig]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = list_engine_threads()
    yield
    assert not list_engine_threads() - before


async def complete(engine: Engine, params: SamplingParams = SHORT) -> list[int]:
    outputs = [output async for output in engine.generate(PROMPT, params)]
    assert [output.finished for output in outputs].count(True) == 1
    return outputs[-1].outputs[0].token_ids


def test_two_event_loops_in_a_row_each_run_an_engine(make_config: MakeConfig) -> None:
    async def main() -> list[int]:
        async with Engine(make_config()) as engine:
            return await complete(engine)

    assert asyncio.run(main()) == asyncio.run(main())


async def test_two_engines_live_in_one_process(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as one, Engine(make_config(block_size=8)) as two:
        first, second = await asyncio.gather(complete(one), complete(two))
        assert first == second


async def test_llm_works_inside_a_running_loop_and_in_a_plain_thread(make_llm: Callable[..., LLM]) -> None:
    """One that is forgotten cleans up behind itself."""

    def work() -> list[int]:
        return make_llm().generate(PROMPT, SHORT, use_tqdm=False)[0].outputs[0].token_ids

    assert work() == await asyncio.to_thread(work)
    gc.collect()


async def test_a_forgotten_stream_is_aborted_when_it_is_collected(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        assert engine.stats().num_running == 1
        del stream
        gc.collect()
        await wait_until(lambda: engine.stats().num_running == 0 and engine.stats().finished["abort"] == 1)
        assert engine.stats().num_free_blocks == engine.stats().num_blocks


async def test_a_cancelled_reader_aborts_its_request(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        reader = asyncio.create_task(complete(engine, LONG))
        await wait_until(lambda: engine.stats().num_running == 1)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await wait_until(lambda: engine.stats().num_running == 0)


async def test_closing_the_engine_ends_open_streams(make_config: MakeConfig) -> None:
    engine = Engine(make_config())
    await engine.start()
    reader = asyncio.create_task(complete(engine, LONG))
    await wait_until(lambda: engine.stats().num_running == 1)
    await engine.close()
    with pytest.raises(Exception, match="the engine was closed"):
        await reader
    await engine.close()


async def test_a_close_waits_for_a_busy_grammar_thread(make_config: MakeConfig) -> None:
    async with Engine(make_config(mock_step_ms=1.0)) as engine:
        core = engine.replicas[0].connector.host.core
        core.grammar._manager.drop = lambda handles: time.sleep(0.3)  # type: ignore[method-assign]
        core.grammar.tell(DropMatchers([1]))


async def test_many_requests_with_aborts_leave_no_task_and_no_block(make_config: MakeConfig) -> None:
    async with Engine(make_config(max_num_waiting=10000)) as engine:
        num_tasks = len(asyncio.all_tasks())

        async def visit(number: int) -> None:
            params = SamplingParams(max_tokens=1 + number % 5, seed=number)
            stream = engine.generate([1 + number % 50, 2, 3], params)
            async for _ in stream:
                if number % 3 == 0:
                    break
            await stream.aclose()

        for start in range(0, 600, 200):
            await asyncio.gather(*(visit(number) for number in range(start, start + 200)))
        await wait_until(lambda: engine.stats().num_running + engine.stats().num_waiting == 0)
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
        assert len(asyncio.all_tasks()) == num_tasks
        assert sum(engine.stats().finished.values()) == 600


@pytest.mark.parametrize(
    ("way", "delay_s"),
    [
        ("llm", 1.0), *(pytest.param(*each, marks=pytest.mark.soak) for each in (("engine", 0.15), ("llm", 0.05))),
    ],
)
def test_ctrl_c_ends_the_program_at_any_moment(way: str, delay_s: float, checkpoint: Path) -> None:
    """The moment is spread from before the load to the middle of an answer."""
    programs = {
        "engine": """
            import asyncio
            from engine import Engine, EngineConfig, SamplingParams
            async def main():
                print('up', flush=True)
                async with Engine(EngineConfig(model=MODEL, num_blocks=400)) as engine:
                    params = SamplingParams(max_tokens=900, ignore_eos=True)
                    while True:
                        async for _ in engine.generate("hello", params):
                            pass
            asyncio.run(main())
        """,
        "llm": """
            from engine import LLM, SamplingParams
            print('up', flush=True)
            llm = LLM(MODEL, num_blocks=400)
            while True:
                llm.generate("hello", SamplingParams(max_tokens=900, ignore_eos=True), use_tqdm=False)
        """,
    }
    # a shell's background job ignores Ctrl-C and hands that down
    head = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code = f"{head}MODEL = {str(checkpoint)!r}\n" + textwrap.dedent(programs[way])
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            time.sleep(delay_s)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=100)
        finally:
            process.kill()  # does nothing to one that has ended
    assert process.returncode in (-signal.SIGINT, 1, 130)
    assert "KeyboardInterrupt" in stderr
    for sign in ("Warning", "never retrieved", "never awaited", "was destroyed", "Exception ignored"):
        assert sign not in stderr, stderr
