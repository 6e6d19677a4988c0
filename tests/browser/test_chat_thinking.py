"""The chat's switch of reasoning, with a model whose chat template has one."""

from pathlib import Path
from typing import Any

from tests.browser.conftest import ROOT, open_site, run_server

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% if enable_thinking is defined and not enable_thinking %}

</think>

{% endif %}{% endif %}"""


def test_reasoning_is_shown_until_it_is_switched_off(desk: Any, tmp_path: Path) -> None:
    for file in (ROOT / "assets" / "demo_model").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with run_server("app", "--model", str(tmp_path)) as (_, url):
        for thinker in open_site(desk, url):
            switch = thinker.page.get_by_label("Think first")
            switch.wait_for()
            thinker.ask("Hello!")
            thinker.figures.get_by_text("Reasoning").wait_for()
            switch.uncheck()
            thinker.page.get_by_label("Retry").last.click()
            thinker.page.locator(".branch").get_by_text("2 of 2").wait_for()
            thinker.page.locator("#growing .message-row").first.wait_for(state="detached")
            assert thinker.figures.get_by_text("Reasoning").count() == 0
            thinker.reload()
            switch.wait_for()
            assert not switch.is_checked()
