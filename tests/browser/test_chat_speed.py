"""A long conversation costs an answer nothing: what grows is sent and drawn alone, whatever stands above it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.browser.site import Site

SHORT, LONG = 2, 200
FIRST, LAST = 5, 25
REST_MS = 2000
GOAL_HZ = 10.0
ANSWER = (
    "Keys and values lie in **blocks** of 16.\n\n- a list item with `code`\n- another\n\n```\nprint(1)\n```\n"
)
# Notes the times of the frames in which the growing text is another one than before.
WATCH = """() => {
  window.updates = [];
  let before = -1;
  const look = () => {
    const now = [...document.querySelectorAll("#growing .bot-row .message-content")].at(-1)?.textContent.length ?? -1;
    if (now !== before && now > 0) window.updates.push(performance.now());
    before = now;
    requestAnimationFrame(look);
  };
  look();
}"""


@dataclass(frozen=True)
class Pace:
    """How an answer grew: updates a second, bytes and CPU time of the page for each, beyond what it costs at rest."""

    hz: float
    bytes_each: float
    cpu_ms_each: float


def open_chat(site: Site, num_messages: int) -> None:
    """A chat of that many messages; they are drawn but, like failed turns, not read by the model."""
    messages = []
    for turn in range(num_messages // 2):
        messages.append({"role": "user", "content": f"Question {turn}: how does paging work?"})
        messages.append({"role": "assistant", "content": ANSWER, "metadata": {"id": "error"}})
    site.open()
    site.import_chat(messages)


def measure(site: Site, num_messages: int) -> Pace:
    """Let an answer grow under so long a history, and look at some of its updates."""
    open_chat(site, num_messages)
    site.limit_answers(2000)
    developer = site.page.context.new_cdp_session(site.page)
    sizes: list[int] = []
    developer.on("Network.dataReceived", lambda event: sizes.append(event["dataLength"]))
    developer.send("Network.enable")
    developer.send("Performance.enable", {"timeDomain": "threadTicks"})
    site.page.evaluate(WATCH)
    # What the page costs while nothing grows: the strip on top, the watching itself.
    site.page.wait_for_timeout(REST_MS)
    cpu_ms = read_cpu_ms(developer)
    site.page.wait_for_timeout(REST_MS)
    idle = (read_cpu_ms(developer) - cpu_ms) / REST_MS
    site.ask("Count, please.")
    # The first updates also pay for what was asked.
    site.page.wait_for_function(f"window.updates.length > {FIRST}")
    cpu_ms, num_bytes, first = read_cpu_ms(developer), sum(sizes), site.page.evaluate("window.updates.length")
    site.page.wait_for_function(f"window.updates.length > {LAST}")
    cpu_ms, num_bytes = read_cpu_ms(developer) - cpu_ms, sum(sizes) - num_bytes
    times = site.page.evaluate("window.updates")[first - 1 :]
    assert site.page.locator("#growing .bot-row").count() == 1, "the answer ended before it was measured"
    # At once, without looking first: it may end by itself meanwhile.
    site.page.evaluate("document.querySelector('#composer button.stop-button')?.click()")
    site.figures.last.wait_for()
    developer.detach()
    num_updates = len(times) - 1
    spent_ms = times[-1] - times[0]
    cost = max(cpu_ms - idle * spent_ms, 0.0) / num_updates
    return Pace(1000 * num_updates / spent_ms, num_bytes / num_updates, cost)


def read_cpu_ms(developer: Any) -> float:
    metrics = developer.send("Performance.getMetrics")["metrics"]
    return 1000 * float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))


def test_under_200_messages_an_answer_grows_as_under_two(lasting: Site) -> None:
    """In Hz where the machine has time for it; always in CPU time, which a busy machine does not change."""
    short, long = measure(lasting, SHORT), measure(lasting, LONG)
    for count, pace in ((SHORT, short), (LONG, long)):
        sizes = f"{pace.bytes_each:.0f} bytes and {pace.cpu_ms_each:.1f} ms of CPU an update"
        print(f"\n{count} messages: {pace.hz:.1f} Hz, {sizes}", end="")
    # Half of the time that an update has at 10 Hz.
    assert long.cpu_ms_each < 500 / GOAL_HZ
    # A history of 200 messages is 40 KB; the strip and the observatory share the line.
    assert long.bytes_each < 4000
    assert long.hz >= min(GOAL_HZ, 0.5 * short.hz)
