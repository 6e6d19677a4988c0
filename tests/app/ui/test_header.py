"""The strip shows model, device, state and load, and a steady rate."""

from app.ui.header import Header, RateMeter, render_header
from engine import EngineConfig
from tests.fakes import FakeEngine, FakeRequest


def test_the_strip_shows_model_state_and_speed() -> None:
    engine = FakeEngine()
    engine.requests.append(FakeRequest("r", "", None, {}))
    strip = render_header([engine], [1234.6])
    assert all(part in strip for part in ("fake", "writing", "<b>1,235</b> tok/s"))
    assert "writing" in render_header([FakeEngine()], [33]), "at a speed, it is not said to rest"
    assert "loading" in render_header([FakeEngine(state="starting")], [0])
    crashed = render_header([FakeEngine(state="restarting", error='boom "<b>"')], [0])
    assert "boom &quot;&lt;b&gt;&quot;" in crashed


def test_the_strip_shows_the_models_that_work() -> None:
    first, other = FakeEngine(), FakeEngine(config=EngineConfig(model="some/model", served_model_name="other"))
    header = Header(lambda: [first, other])
    assert ">2 models<" in (strip := header.draw()) and "ready" in strip
    other.requests.append(FakeRequest("r", "", None, {}))
    assert ">other<" in (strip := header.draw()) and "writing" in strip
    first.requests.append(FakeRequest("r", "", None, {}))
    assert ">2 models<" in (strip := header.draw()) and "other: 0 tok/s" in strip


def test_the_rate_is_a_mean_over_the_window() -> None:
    now = [0.0]
    meter = RateMeter(lambda: now[0])
    rates = []
    for second, tokens in enumerate([0, 100, 200, 200, 200, 200, 200]):
        now[0] = float(second)
        rates.append(round(meter.update(tokens)))
    assert rates == [0, 100, 100, 67, 33, 0, 0]
    # The counter starts again: no negative rate.
    now[0] += 1
    assert meter.update(3) == 0
