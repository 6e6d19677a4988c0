"""The routes that clients of llama.cpp's server ask for."""

import json

from tests.app.api.harness import Server


async def test_a_completion_has_the_fields_of_llama_cpp(server: Server) -> None:
    body = {
        "prompt": "hello",
        "n_predict": 8,
        "repeat_penalty": 1.1,
        "cache_prompt": True,
        "samplers": ["top_k"],
    }
    status, reply = await server.post(
        "/completion", body | {"logit_bias": [[5, False]], "return_tokens": True}
    )
    assert (status, reply["content"], reply["stop_type"]) == (200, "You said", "limit")
    assert reply["tokens_predicted"] == len(reply["tokens"]) == 8 and reply["timings"]["predicted_n"] == 8
    params = server.engine.requests[0].params
    assert (params.temperature, params.repetition_penalty, params.logit_bias) == (0.8, 1.1, {5: -100.0})
    _, reply = await server.post("/completion", {"prompt": "hello"})
    assert (reply["content"], reply["stop_type"]) == ("You said hello", "eos")


async def test_a_stream_ends_with_the_account(server: Server) -> None:
    raw = (await server.stream("/completion", {"prompt": "hello", "stream": True})).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in raw.splitlines() if line]
    assert "".join(event["content"] for event in events) == "You said hello"
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]


async def test_probabilities_come_whole_and_in_pieces(server: Server) -> None:
    body = {"prompt": "hello", "n_probs": 2, "n_predict": 8}
    _, reply = await server.post("/completion", body)
    found = reply["completion_probabilities"]
    assert [entry["id"] for entry in found] == [ord(letter) for letter in reply["content"]]
    assert all(len(entry["top_logprobs"]) == 2 and "id" in entry["top_logprobs"][0] for entry in found)
    raw = (await server.stream("/completion", body | {"stream": True})).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in raw.splitlines() if line]
    assert [entry for event in events for entry in event.get("completion_probabilities", ())] == found
    assert reply["has_new_line"] is events[-1]["has_new_line"] is False


async def test_a_constraint_is_kept_and_what_would_be_dropped_is_refused(server: Server) -> None:
    await server.post("/completion", {"prompt": "x", "json_schema": {"type": "integer"}})
    assert server.engine.requests[0].params.grammar.kind == "json_schema"
    status, reply = await server.post("/completion", {"prompt": "x", "mirostat": 2})
    assert (status, reply["error"]["param"]) == (400, "mirostat")
    status, reply = await server.post("/completion", {"prompt": "x", "n_predict": 3, "repeat_penalty": -1})
    assert (status, reply["error"]["param"]) == (400, "repeat_penalty")


async def test_properties_slots_and_tokens(server: Server) -> None:
    _, properties = await server.get("/props")
    _, slots = await server.get("/slots")
    assert properties["total_slots"] == len(slots) and properties["model_alias"] == "fake"
    assert not any(slot["is_processing"] for slot in slots)
    _, reply = await server.post("/tokenize", {"content": "abc"})
    assert (await server.post("/detokenize", {"tokens": reply["tokens"]}))[1]["content"] == "abc"
