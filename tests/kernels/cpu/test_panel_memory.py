"""Memory for packed matrices: pieces of one map that never meet, and that stay as long as somebody reads them."""

import gc
import mmap
import threading
import weakref
from pathlib import Path

import pytest
import torch

from kernels.cpu import panel_memory
from kernels.cpu.panel_memory import PanelMemory
from kernels.cpu.result_memory import ResultMemory


def test_pieces_start_with_a_cache_line_and_do_not_meet() -> None:
    memory = PanelMemory()
    pieces = [memory.take(size) for size in (1, 63, 64, 65, 10_000, 0, 3)]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces if len(piece))
    assert all((piece == number).all() for number, piece in enumerate(pieces))


def test_matrices_of_a_small_model_share_a_large_page() -> None:
    memory = PanelMemory()
    first, second = memory.take(700_000), memory.take(700_000)
    assert first.data_ptr() % (2 * 2**20) == 0
    assert 0 <= second.data_ptr() - first.data_ptr() - 700_000 < 64


def test_a_matrix_longer_than_a_piece_gets_one_of_its_own() -> None:
    memory = PanelMemory()
    assert len(memory.take(panel_memory._PIECE_BYTES + 1)) == panel_memory._PIECE_BYTES + 1
    assert len(memory.take(100)) == 100


def test_the_map_goes_with_its_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    maps: list[weakref.ref[mmap.mmap]] = []

    class Map(mmap.mmap):
        def __init__(self, *_: int) -> None:
            maps.append(weakref.ref(self))

    monkeypatch.setattr(panel_memory.mmap, "mmap", Map)
    memory = PanelMemory()
    taken = memory.take(5)
    taken.fill_(7)
    del memory
    gc.collect()
    assert taken.tolist() == [7] * 5 and maps[0]() is not None
    del taken
    gc.collect()
    assert maps[0]() is None


@pytest.mark.parametrize("delay_s", [0, 0.01])
def test_maps_are_in_large_pages_where_the_system_has_them(delay_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights once were in shared memory, to which most systems give small pages."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.is_file() or "[never]" in setting.read_text():
        pytest.skip("this system gives no large pages")
    monkeypatch.setattr(panel_memory, "_AT_ONCE_BYTES", 0)
    memory = PanelMemory(delay_s)
    pages = memory.take(panel_memory._PIECE_BYTES).fill_(1)
    for thread in threading.enumerate():
        if thread.name == "large-pages":
            thread.join()
    maps = Path("/proc/self/smaps").read_text().splitlines()
    sizes = [int(line.split()[1]) for line in maps if line.startswith("AnonHugePages")]
    assert pages.data_ptr() % 2**21 == 0 and (pages == 1).all()
    assert any(size >= 8 * 1024 for size in sizes)


def test_a_result_has_memory_of_its_own_until_its_last_view_is_gone() -> None:
    memory, shape = ResultMemory(), (1024, 512)
    first = memory.take(shape, torch.float32)
    place, view = first.data_ptr(), first[5:]
    del first
    second = memory.take(shape, torch.float32)
    assert second.data_ptr() != place
    del view
    assert memory.take((512, 512), torch.float32).data_ptr() == place
