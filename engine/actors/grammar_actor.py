"""GrammarActor: compiles grammars in a pool, and fills masks in one thread during the forward pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import assert_never

from engine.actors.thread_actor import ThreadActor
from engine.core.actor_messages import (
    DropMatchers,
    FillMasks,
    FindDrafts,
    GrammarFailed,
    GrammarInbox,
    GrammarReport,
    StepMasks,
)
from engine.core.grammar_manager import ApartMask, GrammarManager
from engine.errors import EngineDead, InvalidRequest
from engine.messages import AddRequest
from engine.outputs import GrammarInfo
from engine.spec.forced import ForcedDrafts
from engine.thread_priority import lower_priority
from grammar import CompiledGrammar, GrammarCompiler, GrammarSpec, Matcher, StoppableMatcher

COMPILE_THREADS = 2
# Building the compiler of so many tokens holds the GIL for half a second: better early than amid streams.
LARGE_VOCABULARY = 32_000
BUILD_DELAY_S = 2.0  # of the compiler of a large vocabulary: the first tokens have the processor for themselves
# Longer specs and those for xgrammar may take seconds to compile, so they use a separate thread.
LONG_SPEC = 8192  # characters
# Niceness of the threads that fill slow masks and compile long grammars. A thread of the forward pass on the same core
# gets three times their CPU time.
NICENESS = 5


@dataclass(frozen=True, slots=True)
class OpenMatcher:
    """Message to the actor's own thread, since a matcher cannot be sent to another process."""

    handle: int
    matcher: Matcher
    generated_token_ids: list[int]


class GrammarActor(ThreadActor[GrammarInbox | OpenMatcher | ApartMask]):
    """Owns the compiler and the matchers.

    Args:
        make_compiler: builds the compiler on first use, for a large vocabulary soon after the start. Its argument: a
            pool for long compiles without the GIL.
        encode: text -> token ids, for drafts of forced text; None: there are no drafts.
    """

    def __init__(
        self, make_compiler: Callable[[Executor], GrammarCompiler], vocab_size: int, timeout_s: float,
        send_masks: Callable[[StepMasks], None], tell_scheduler: Callable[[GrammarReport], None],
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        super().__init__("troupe-grammar")
        self._manager = GrammarManager(vocab_size)
        self._make_compiler = make_compiler
        self._compiler: GrammarCompiler | None = None
        self._encode = encode
        self._forced: ForcedDrafts | None = None
        self._timeout_s = timeout_s
        self._send_masks = send_masks
        self._tell_scheduler = tell_scheduler
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, "troupe-compile")
        self._slow_pool = ThreadPoolExecutor(1, "troupe-compile-slow")
        # These pools rarely hold the GIL. A thread that holds it and waits for a CPU delays all others.
        lower = partial(lower_priority, NICENESS)
        self._native_pool = ThreadPoolExecutor(1, "troupe-compile-native", lower)
        # The lanes for masks of slow programs and of very slow ones.
        self._lanes = tuple(ThreadPoolExecutor(1, f"troupe-masks-{i}", lower) for i in range(2))
        self._building = Lock()
        self._is_large = vocab_size >= LARGE_VOCABULARY

    async def open(self, message: AddRequest, spec: GrammarSpec) -> GrammarInfo:
        """Compile a request's grammar, and make the matchers of its completions. Raises as `compile` does."""
        compiled, info = await self.compile(spec)
        matchers = [compiled.matcher() for _ in message.completions]
        if message.params.stop_token_ids:
            matchers = [StoppableMatcher(each, message.params.stop_token_ids) for each in matchers]
        for completion, matcher in zip(message.completions, matchers, strict=True):
            self.tell(OpenMatcher(completion.handle, matcher, completion.generated_token_ids))
        return info

    async def compile(self, spec: GrammarSpec) -> tuple[CompiledGrammar, GrammarInfo]:
        """Compile in a thread, or return the cached grammar.

        The time limit counts the compile alone, not the wait for a thread.

        Raises:
            GrammarError: the grammar is malformed or cannot be enforced.
            InvalidRequest: it took longer than the time limit.
            EngineDead: the engine ended first.
        """
        start = time.monotonic()
        compiled = None if self._compiler is None else self._compiler.find(spec)
        if compiled is None:
            compiled = await self._compile_in_thread(spec)
        return compiled, GrammarInfo(compiled.backend, time.monotonic() - start)

    def count_cached(self) -> tuple[int, int]:
        """Return how many grammars the compiler keeps, and how many it has dropped."""
        return (0, 0) if self._compiler is None else self._compiler.count_cached()

    async def _compile_in_thread(self, spec: GrammarSpec) -> CompiledGrammar:
        begun: asyncio.Future[None] = self._loop.create_future()
        pending = None if self._compiler is None else self._compiler.find_pending(spec)
        if pending is not None:
            # Another request compiles the same spec. Waiting for it takes no thread.
            job = asyncio.wrap_future(pending, loop=self._loop)
            begun.set_result(None)
        else:
            is_slow = spec.backend == "xgrammar" or len(spec.text) > LONG_SPEC
            pool = self._slow_pool if is_slow else self._pool
            job = self._loop.run_in_executor(pool, self._compile, spec, begun)
        try:
            await asyncio.wait((begun, job), return_when=asyncio.FIRST_COMPLETED)
            return await asyncio.wait_for(job, self._timeout_s)
        except asyncio.CancelledError:
            if (caller := asyncio.current_task()) is not None and caller.cancelling():
                raise
            raise EngineDead("the engine ended while the grammar waited for a thread") from None
        except TimeoutError as error:
            raise InvalidRequest(
                f"the grammar took longer than {self._timeout_s:g} s to compile; make it smaller", "grammar"
            ) from error
        finally:
            job.cancel()  # a job without a thread yet is not compiled
            begun.cancel()

    async def run(self) -> None:
        timer = self._loop.call_later(BUILD_DELAY_S, self._build_early)
        try:
            await super().run()
        finally:
            timer.cancel()
            for pool in (self._pool, self._slow_pool, self._native_pool, *self._lanes):
                pool.shutdown(wait=False, cancel_futures=True)

    def work(self) -> None:
        while (message := self._queue.get()) is not None:
            match message:
                case FillMasks():
                    masks, failed, begun = self._manager.fill(message)
                    if len(masks.indices) or masks.ended:
                        self._send_masks(masks)
                    self._report(failed)
                    for each in begun:
                        self._begin(each)
                case ApartMask():
                    masks, failed, following = self._manager.finish(message)
                    if following is not None:
                        self._begin(following)
                    self._send_masks(masks)
                    self._report(failed)
                case FindDrafts():
                    answers = self._manager.find_drafts(message, self._open_forced())
                    self.post(self._tell_scheduler, GrammarReport([], drafts=answers))
                case OpenMatcher():
                    self._report(
                        self._manager.open(message.handle, message.matcher, message.generated_token_ids)
                    )
                case DropMatchers(handles=handles):
                    self._manager.drop(handles)
                case _:
                    assert_never(message)

    def _report(self, failed: list[GrammarFailed]) -> None:
        """Report failures. Without failures the scheduler is not woken, because the step's result follows the masks."""
        if failed:
            self.post(self._tell_scheduler, GrammarReport(failed))

    def _open_forced(self) -> ForcedDrafts:
        if self._forced is None:
            assert self._compiler is not None and self._encode is not None, (
                "only matchers are asked for drafts"
            )
            self._forced = ForcedDrafts(self._compiler.vocabulary, self._encode)
        return self._forced

    def _begin(self, mask: ApartMask) -> None:
        """Fill masks in a lane's thread, then return them to the actor's thread."""
        self._lanes[mask.is_very_slow].submit(self._fill_apart, mask)

    def _fill_apart(self, mask: ApartMask) -> None:
        mask.fill()
        self.tell(mask)

    def _build_early(self) -> None:
        if self._is_large:
            self._pool.submit(self._build_compiler)

    def _build_compiler(self) -> GrammarCompiler:
        with self._building:
            if self._compiler is None:
                self._compiler = self._make_compiler(self._native_pool)
            return self._compiler

    def _compile(self, spec: GrammarSpec, begun: asyncio.Future[None]) -> CompiledGrammar:
        compiler = self._build_compiler()
        # The compiler of a large vocabulary takes seconds on a busy machine, which the grammar's time does not include.
        self.post(_tell_begun, begun)
        return compiler.compile(spec)


def _tell_begun(begun: asyncio.Future[None]) -> None:
    if not begun.done():
        begun.set_result(None)
