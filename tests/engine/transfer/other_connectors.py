"""Connectors of somebody else, as kv_connector_module_path names them."""

from collections.abc import Sequence

from engine.kv_transfer_config import UNIT_TOKENS, KVTransferConfig
from engine.transfer.units import Unit, UnitLayout

UNITS: dict[bytes, bytes] = {}


class DictConnector:
    """Keeps units in this process."""

    def __init__(self, config: KVTransferConfig, layout: UnitLayout) -> None:
        self.layout = layout

    def get_num_new_matched_tokens(self, keys: Sequence[bytes]) -> int:
        return UNIT_TOKENS * next((at for at, key in enumerate(keys) if key not in UNITS), len(keys))

    def start_load_kv(self, units: Sequence[Unit]) -> list[bool]:
        for key, (part,) in units:
            part[:] = memoryview(UNITS[key])
        return [True] * len(units)

    def save_kv(self, units: Sequence[Unit]) -> None:
        UNITS.update((key, part.tobytes()) for key, (part,) in units)

    def discard_kv(self, keys: Sequence[bytes]) -> None:
        raise AssertionError("no request fails in this test")

    def shutdown(self) -> None:
        UNITS.clear()


class LateConnector(DictConnector):
    """Promises all units; every second load comes too late, and a save fails."""

    num_loads = 0

    def get_num_new_matched_tokens(self, keys: Sequence[bytes]) -> int:
        return UNIT_TOKENS * len(keys)

    def start_load_kv(self, units: Sequence[Unit]) -> list[bool]:
        self.num_loads += 1
        for _, (part,) in units:
            part[: len(part) // 2] = 77  # half of it has come
        if self.num_loads % 2:
            raise TimeoutError("late")
        return [False] * len(units)

    def save_kv(self, units: Sequence[Unit]) -> None:
        raise OSError("the store is full")
