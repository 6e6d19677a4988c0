"""OpenAI's prediction reaches the engine and is counted in usage; malformed ones are refused."""

from typing import Any

import pytest

from tests.app.api.harness import Server


@pytest.mark.parametrize(
    "content", ["some text", [{"type": "text", "text": "some "}, {"type": "text", "text": "text"}]]
)
async def test_a_prediction_reaches_the_engine(server: Server, content: Any) -> None:
    status, reply = await server.chat(prediction={"type": "content", "content": content})
    assert status == 200
    assert server.engine.requests[-1].options["prediction"] == "some text"
    assert reply["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0
    }


@pytest.mark.parametrize(
    "prediction", [{"type": "text", "content": "a"}, {"type": "content"}, {"type": "content", "content": ["a"]}, "a"]
)
async def test_a_malformed_prediction_is_refused(server: Server, prediction: Any) -> None:
    status, reply = await server.chat(prediction=prediction)
    assert status == 400
    assert reply["error"]["param"].startswith("prediction")
