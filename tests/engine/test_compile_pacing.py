"""CompilePacing: when a thread that compiles sleeps."""

from types import SimpleNamespace

import pytest

from engine.actors import compile_pacing
from engine.actors.compile_pacing import MAX_PAUSES_S, PAUSE_S, RUN_S, CompilePacing


def count_sleeps(monkeypatch: pytest.MonkeyPatch, is_busy: bool, calls_s: list[float]) -> list[float]:
    """Call `pause` so many seconds after the start of a compile. Returns how long each call that slept did."""
    clock, sleeps = SimpleNamespace(now=100.0), []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(compile_pacing, "time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=sleep))
    pacing = CompilePacing(lambda: is_busy)
    pacing.start()
    for since_s in calls_s:
        clock.now = 100.0 + since_s
        pacing.pause()
    return sleeps


def test_a_compile_sleeps_after_each_run_while_steps_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed_s = 1.5 * RUN_S + PAUSE_S
    calls_s = [0.5 * RUN_S, 1.5 * RUN_S, resumed_s + 0.5 * RUN_S, resumed_s + 1.5 * RUN_S]
    assert count_sleeps(monkeypatch, True, calls_s) == [PAUSE_S, PAUSE_S]


def test_a_compile_does_not_sleep_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls_s = [number * (PAUSE_S + 2 * RUN_S) for number in range(1, 1000)]
    assert MAX_PAUSES_S <= sum(count_sleeps(monkeypatch, True, calls_s)) <= MAX_PAUSES_S + PAUSE_S


def test_a_compile_does_not_sleep_beside_an_idle_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_sleeps(monkeypatch, False, [2 * RUN_S, 9 * RUN_S]) == []
