"""Answers of the model and its adapter side by side, on the real engine."""

from contextlib import aclosing

from app.ui.chat.answers import is_looping, join_streams
from engine import Engine, EngineConfig, LoRARequest, SamplingParams
from engine.config_fields import DEMO_MODEL
from tests.app.api.harness import needs_model

pytestmark = needs_model


async def test_two_answers_grow_side_by_side_and_closing_ends_both() -> None:
    modules = (f"loud={DEMO_MODEL}/lora",)
    async with Engine(EngineConfig(num_blocks=128, enable_lora=True, lora_modules=modules)) as engine:
        prompt = await engine.render_chat([{"role": "user", "content": "Hello, who are you?"}])

        def start(max_tokens: int) -> dict[str, object]:
            params = SamplingParams(temperature=0, max_tokens=max_tokens)
            return {
                "demo": engine.generate(prompt, params),
                "loud": engine.generate(prompt, params, lora_request=LoRARequest("loud")),
            }

        async with aclosing(join_streams(start(8))) as outputs:  # type: ignore[arg-type]
            seen = [output async for output in outputs]
        assert seen[-1].keys() == {"demo", "loud"} and len(seen) > 3, "a model waited for the other one"
        texts = {name: output.outputs[0].text for name, output in seen[-1].items()}
        assert texts == {"demo": "I am the Troupe ", "loud": "I AM THE TR"}
        assert all(output.finished for output in seen[-1].values())
        async with aclosing(join_streams(start(200))) as outputs:  # type: ignore[arg-type]
            async for _ in outputs:
                break
        assert not engine.stats().num_unfinished


def test_only_text_that_ends_in_copies_is_said_to_loop() -> None:
    loop = "the cache is warm, and "
    assert is_looping(f"First, {loop * 5}the ca")
    assert not any(map(is_looping, (loop * 3, f"{loop * 9}then it is cold.", "a b c d e f g h i j " * 2, "")))
