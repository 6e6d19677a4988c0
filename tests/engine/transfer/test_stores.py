"""The stores of units: what is saved can be loaded, and whatever is missing, damaged or late is a miss."""

import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from engine import ConfigError
from engine.kv_transfer_config import KVTransferConfig, parse_kv_transfer_config
from engine.transfer.block_server import BlockServer
from engine.transfer.connector import KVConnector, make_connector
from engine.transfer.tcp_store import TcpStore
from engine.transfer.units import Unit, UnitLayout

LAYOUT = UnitLayout("weights", 1000)
SECRET = "a secret of the replicas"
SMALL = 2**20


def make_unit(number: int, num_parts: int = 3) -> Unit:
    chance = np.random.default_rng(number)
    value = chance.integers(0, 256, LAYOUT.num_bytes, dtype=np.uint8)
    return chance.bytes(32) + bytes((1,) if number % 2 else ()), np.array_split(value, num_parts)


def make_empty(key: bytes, num_parts: int = 1) -> Unit:
    return key, np.array_split(np.zeros(LAYOUT.num_bytes, dtype=np.uint8), num_parts)


def join(unit: Unit) -> bytes:
    return b"".join(part.tobytes() for part in unit[1])


def make_file_config(folder: Path) -> KVTransferConfig:
    extra = {"shared_storage_path": str(folder)}
    return KVTransferConfig("FileConnector", kv_buffer_size=SMALL, kv_connector_extra_config=extra)


@pytest.fixture
def server() -> Iterator[BlockServer]:
    server = BlockServer("127.0.0.1", 0, SECRET, SMALL)
    yield server
    server.close()


@pytest.fixture(params=["file", "shared memory", "tcp"])
def open_store(
    request: pytest.FixtureRequest, tmp_path: Path, server: BlockServer
) -> Iterator[Callable[..., KVConnector]]:
    """Opens any number of connectors to one store."""
    memory = os.memfd_create("test")

    def make(layout: UnitLayout = LAYOUT) -> KVConnector:
        kind = {"file": "FileConnector", "shared memory": "SharedMemoryConnector", "tcp": "TcpConnector"}
        path = tmp_path / "blocks" if request.param == "file" else f"/proc/{os.getpid()}/fd/{memory}"
        config = parse_kv_transfer_config(
            f'{{"kv_connector": "{kind[request.param]}", "kv_port": {server.port}, "kv_buffer_size": {SMALL}, '
            f'"kv_connector_extra_config": {{"shared_storage_path": "{path}"}}}}'
        )
        store = make_connector(config, layout, SECRET)
        assert store is not None
        return store

    yield make
    os.close(memory)


def test_units_of_one_process_are_found_by_another(open_store: Callable[..., KVConnector]) -> None:
    units = [make_unit(number) for number in range(20)]
    writer, reader = open_store(), open_store()
    writer.save_kv(units)
    keys = [key for key, _ in units]
    assert reader.get_num_new_matched_tokens(keys) == 20 * 16
    assert reader.get_num_new_matched_tokens([*keys[:7], b"x" * 32, *keys[7:]]) == 7 * 16
    loaded = [make_empty(key) for key in (*keys, b"x" * 32)]
    assert reader.start_load_kv(loaded) == [True] * 20 + [False]
    assert list(map(join, loaded[:20])) == list(map(join, units))
    reader.discard_kv(keys[:3])
    assert writer.start_load_kv([make_empty(key) for key in keys[:4]]) == [False] * 3 + [True]
    writer.shutdown()
    reader.shutdown()


def test_a_full_store_keeps_the_units_that_were_used_last(open_store: Callable[..., KVConnector]) -> None:
    store = open_store()
    used = make_unit(0)
    store.save_kv([used])
    for number in range(1, 1600):
        store.save_kv([make_unit(number)])
        assert store.start_load_kv([make_empty(used[0])]) == [True]
    found = sum(store.start_load_kv([make_empty(make_unit(number)[0]) for number in range(1, 1600)]))
    assert 700 < found <= SMALL // LAYOUT.num_bytes
    store.shutdown()


def test_units_of_another_model_are_not_found(open_store: Callable[..., KVConnector], tmp_path: Path) -> None:
    unit, store = make_unit(0), open_store()
    store.save_kv([unit])
    try:
        other = open_store(UnitLayout("other weights", LAYOUT.num_bytes))
    except AssertionError:
        return  # shared memory belongs to one layout
    assert other.start_load_kv([make_empty(unit[0])]) == [False]
    other.shutdown()
    store.shutdown()


def test_a_flipped_byte_in_a_file_is_a_miss(tmp_path: Path) -> None:
    store = make_connector(make_file_config(tmp_path), LAYOUT, None)
    assert store is not None
    units = [make_unit(number) for number in range(50)]
    store.save_kv(units)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    value = join(units[7])
    at = content.index(value) + random.randrange(len(value))
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes((content[at] ^ 4,)))
    found = store.start_load_kv([make_empty(key) for key, _ in units])
    assert [number for number, is_found in enumerate(found) if not is_found] == [7]
    store.save_kv(units)
    assert all(store.start_load_kv([make_empty(key) for key, _ in units]))
    store.shutdown()


def test_a_server_flips_a_byte(server: BlockServer) -> None:
    store, unit = TcpStore(("127.0.0.1", server.port), SECRET, LAYOUT), make_unit(0)
    store.save_kv([unit])
    ((_, value),) = server._units.values()
    value[500] ^= 1
    assert store.start_load_kv([make_empty(unit[0])]) == [False]
    store.shutdown()


def test_a_client_without_the_secret_is_refused(server: BlockServer) -> None:
    store = TcpStore(("127.0.0.1", server.port), "another secret of 24", LAYOUT)
    with pytest.raises(ConnectionError, match="data_parallel_key differs"):
        store.save_kv([make_unit(0)])
    assert not server._units


def test_a_server_that_is_silent_or_gone_costs_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.transfer.tcp_store.TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = TcpStore(listener.getsockname(), SECRET, LAYOUT)
        with pytest.raises(TimeoutError):
            store.get_num_new_matched_tokens([b"x" * 32])
    assert store.get_num_new_matched_tokens([b"x" * 32]) == 0  # at once: it was just seen to fail
    store._retry_at = 0.0
    with pytest.raises(ConnectionRefusedError):
        store.get_num_new_matched_tokens([b"x" * 32])


def test_a_unit_that_is_replaced_while_it_is_read_is_a_miss_or_whole(tmp_path: Path) -> None:
    config, layout = make_file_config(tmp_path), UnitLayout("large", 100_000)
    values = [(bytes((number,)) * 32, [np.full(layout.num_bytes, number, np.uint8)]) for number in range(12)]
    stores = [make_connector(config, layout, None) for _ in range(2)]

    def write() -> None:
        for number in range(600):
            assert stores[0] is not None
            stores[0].save_kv([values[number % 12]])

    writer = Thread(target=write)
    writer.start()
    num_found = 0
    while writer.is_alive():
        for key, _ in values:
            part = np.zeros(layout.num_bytes, np.uint8)
            assert stores[1] is not None
            (is_found,) = stores[1].start_load_kv([(key, [part])])
            assert not is_found or (part == key[0]).all()
            num_found += is_found
    writer.join()
    assert num_found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"kv_role": "kv_both"}', "with kv_connector"),
        ('{"kv_connector": "NixlConnector"}', "kv_connector='NixlConnector' must be one of Shared"),
        ('{"kv_connector": "TcpConnector", "kv_role": "both"}', "kv_role='both' must be one of kv_producer"),
        ('{"kv_connector": "TcpConnector", "kv_rank": 1}', "unknown: kv_rank"),
        ('{"kv_connector": "TcpConnector", "kv_load_failure_policy": "fail"}', "must be recompute"),
        ('{"kv_connector": "FileConnector"}', "needs shared_storage_path"),
        ('{"kv_connector": "TcpConnector", "kv_connector_extra_config": {"prefill": 1}}', "unknown keys"),
    ],
)
def test_a_wrong_setting_is_named(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_kv_transfer_config(text)
