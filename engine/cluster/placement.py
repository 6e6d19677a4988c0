"""Decides where an engine's cores run: in this process, or in processes of their own with threads and devices."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from functools import cache, partial
from typing import BinaryIO, NamedTuple

import torch

from engine.cluster.connection import Connector, LocalConnector, ProcessConnector
from engine.cluster.core_host import LoadTokenizer, load_tokenizer
from engine.cluster.ray_placement import RayPlacement
from engine.cluster.remote import RemoteListener
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.host_memory import measure_host_memory
from engine.kv_transfer_config import SHARED_MEMORY, TCP
from engine.transfer.block_server import BlockServer
from kernels.cpu import count_cores

SharedStore = BlockServer | BinaryIO  # of KV blocks, which the front has opened for its cores


class Placement(NamedTuple):
    """Where the cores of an engine run."""

    connectors: list[Connector]  # one for each replica
    load_tokenizer: LoadTokenizer
    listener: RemoteListener | RayPlacement | None  # accepts what runs on other machines, or starts it
    store: SharedStore | None


def place_cores(config: EngineConfig) -> Placement:
    """Return the connectors of one core in this process, or of core processes here and elsewhere."""
    config, store = open_shared_store(config)
    # Read once, because a core in this process uses the same tokenizer.
    load = cache(partial(load_tokenizer, config))
    num_devices = 0 if config.device == "cpu" else torch.cuda.device_count()
    is_local = config.core == "local" or (config.core == "auto" and not num_devices)
    connectors: list[Connector]
    if is_local and config.data_parallel_size == 1 and not config.num_remote_replicas:
        connectors = [LocalConnector(config, load)]
    else:
        connectors = [*place_processes(config, num_devices)]
    listener: RemoteListener | RayPlacement | None = None
    if config.num_remote_replicas:
        uses_ray = config.data_parallel_backend == "ray"
        port = 0 if uses_ray else config.data_parallel_rpc_port
        listener = remote = RemoteListener(
            *(config.data_parallel_address, port, config.data_parallel_key or secrets.token_hex(32)),
            publishes_kv_events=config.data_parallel_size > 1,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
        )
        ranks = range(len(connectors), config.data_parallel_size)
        connectors += [remote.make_connector(rank) for rank in ranks]
        if uses_ray:
            listener = RayPlacement(config, remote)
    elif config.distributed_executor_backend == "ray":
        listener = RayPlacement(config, None)
    return Placement(connectors, load, listener, store)


def open_shared_store(config: EngineConfig) -> tuple[EngineConfig, SharedStore | None]:
    """Open the store of KV blocks that cores use together, if the front has to. Returns a config that names it."""
    transfer = config.read_kv_transfer()
    if transfer is None:
        return config, None
    store: SharedStore | None = None
    free_bytes = measure_host_memory()[1]
    if transfer.kv_connector in (SHARED_MEMORY, TCP) and transfer.kv_buffer_size > free_bytes:
        raise ConfigError(
            f"kv_transfer_config: kv_buffer_size={transfer.kv_buffer_size} exceeds the {free_bytes} free bytes of RAM"
        )
    if transfer.kv_connector == TCP and transfer.saves:
        assert config.data_parallel_key is not None, "checked by EngineConfig"
        store = BlockServer(
            transfer.kv_ip, transfer.kv_port, config.data_parallel_key, transfer.kv_buffer_size
        )
        transfer = replace(transfer, kv_port=store.port)
    elif transfer.kv_connector == SHARED_MEMORY and transfer.path is None:
        # Memory without a name of its own: the system frees it when the last process has ended.
        descriptor = os.memfd_create("troupe-blocks")
        store = os.fdopen(descriptor, "rb")
        extra = transfer.kv_connector_extra_config
        path = {"shared_storage_path": f"/proc/{os.getpid()}/fd/{descriptor}"}
        transfer = replace(transfer, kv_connector_extra_config=extra | path)
    return replace(config, kv_transfer_config=transfer.to_json()), store


def place_processes(config: EngineConfig, num_devices: int) -> list[ProcessConnector]:
    """Divide the CUDA devices, or the cores of the CPU, among the replicas."""
    num_replicas = config.data_parallel_size - config.num_remote_replicas
    if not num_devices and config.num_threads is None and num_replicas > 1:
        config = replace(config, num_threads=max(1, count_cores() // num_replicas))
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    devices = visible if len(visible) == num_devices else [str(index) for index in range(num_devices)]
    num_ranks = config.ranks_per_node

    def find_devices(index: int) -> str | None:
        """Return the devices of a replica, one for each rank; replicas share them if there are too few."""
        ranks = range(index * num_ranks, (index + 1) * num_ranks)
        return ",".join(dict.fromkeys(devices[rank % num_devices] for rank in ranks)) if devices else None

    return [
        ProcessConnector(configure_replica(config, index), config.data_parallel_size > 1, find_devices(index))
        for index in range(num_replicas)
    ]


def configure_replica(config: EngineConfig, index: int) -> EngineConfig:
    """Return the config of one replica: with prefill replicas the first ones save blocks, and the others load them."""
    transfer = config.read_kv_transfer()
    if transfer is None or not transfer.num_prefill_replicas:
        return config
    role = "kv_producer" if index < transfer.num_prefill_replicas else "kv_consumer"
    extra = transfer.kv_connector_extra_config | {"prefill_replicas": 0}
    transfer = replace(transfer, kv_role=role, kv_connector_extra_config=extra)
    return replace(config, kv_transfer_config=transfer.to_json())
