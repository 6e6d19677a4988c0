"""vLLM's proxy protocol: a prompt goes to a prefill server, and its kv_transfer_params to a decode server."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from app.config import AppConfig
from engine import Engine, EngineConfig
from tests.app.api.harness import Server, needs_model, run_server

pytestmark = needs_model
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me of the sea. " * 12}], "max_tokens": 12, "seed": 3,
}


async def start(stack: AsyncExitStack, folder: Path, role: str | None) -> Server:
    transfer = {
        "kv_connector": "FileConnector", "kv_role": role, "kv_buffer_size": 2**26, "engine_id": "P",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    config = EngineConfig(num_blocks=256, kv_transfer_config=transfer if role else None)  # type: ignore[arg-type]
    engine = await stack.enter_async_context(Engine(config))
    return await stack.enter_async_context(run_server(engine, AppConfig()))


async def test_a_proxy_takes_a_prompt_to_one_server_and_its_answer_to_another(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        plain, prefill, decode = [await start(stack, tmp_path, role) for role in (None, "kv_producer", "kv_consumer")]
        _, expected = await plain.post("/v1/chat/completions", BODY)
        asked = {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None,
        }
        status, reply = await prefill.post(
            "/v1/chat/completions", BODY | {"max_tokens": 1, "kv_transfer_params": asked}
        )
        given = reply["kv_transfer_params"]
        assert status == 200 and given["do_remote_prefill"] and given["remote_engine_id"] == "P"
        status, answer = await decode.post("/v1/chat/completions", BODY | {"kv_transfer_params": given})
        assert answer["choices"] == expected["choices"]
        num_prompt = answer["usage"]["prompt_tokens"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (num_prompt - 1) // 16 * 16 > 32
        assert answer["kv_transfer_params"] is None
        _, text = await decode.get("/metrics")
        assert f'kv_transfer_received_tokens_total{{engine="0",model_name="demo_model"}} {float(cached)}' in text


async def test_what_a_server_cannot_do_is_refused(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        plain = await start(stack, tmp_path, None)
        for given, reason in (
            ({"do_remote_decode": True}, "needs a server whose kv_transfer_config saves blocks"),
            ({"do_remote_decode": 1}, "must be true or false"),
            ({"do_remote_decode": True, "do_remote_prefill": True}, "one of do_remote_decode and"),
        ):
            status, reply = await plain.post("/v1/chat/completions", BODY | {"kv_transfer_params": given})
            assert (status, reply["error"]["param"]) == (400, "kv_transfer_params")
            assert reason in reply["error"]["message"]
        status, _ = await plain.post(
            "/v1/chat/completions", BODY | {"kv_transfer_params": {"do_remote_prefill": True}}
        )
        assert status == 200
