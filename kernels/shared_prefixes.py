"""SharedPrefixes: which requests of a step begin with the same blocks, in tensors that a recorded step can read.

requests      0   1   2   3   4   5          group 0: 1, 3, 4 share 1024 keys; group 1: 0, 5 share 512
leaders       0   1  -1   1   1   0          first member of the request's group
shared_lens  512 1024 0 1024 1024 512
members       1   3   4   0   5   .          group after group
group_start   0   3   5   5 ...              groups in no use are empty
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Groups that a step can have.
MAX_GROUPS = 8
# Integers: every tensor starts where 16 bytes end, so that no launch sees an unaligned pointer.
ALIGNMENT = 4

Group = tuple[Sequence[int], int]  # (requests of the step, keys that all of them share)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of requests with one new token each whose leading keys are the same blocks; all int32, on the device.

    A request shares its first `shared_lens[r]` keys with `leaders[r]`, the first member of its group, of which no
    member shares more than it does; requests that share nothing have the leader -1.
    """

    packed: Tensor  # what the others are parts of: one copy moves them all
    members: Tensor  # [R]
    leaders: Tensor  # [R]
    shared_lens: Tensor  # [R]
    group_start: Tensor  # [G + 1], cumulative sizes of the groups

    @property
    def num_groups(self) -> int:
        """Room for so many groups."""
        return self.group_start.shape[0] - 1

    @classmethod
    def view(cls, packed: Tensor, num_requests: int) -> SharedPrefixes:
        """Lay the four tensors over one of `packed_size(num_requests)` integers."""
        width = _align(num_requests)
        members, leaders, lens = (packed[at * width : at * width + num_requests] for at in range(3))
        return cls(packed, members, leaders, lens, packed[3 * width :])


def packed_size(num_requests: int) -> int:
    """Integers that the groups of a step with room for `num_requests` requests take."""
    return 3 * _align(num_requests) + MAX_GROUPS + 1


def pack_groups(groups: Sequence[Group], num_requests: int) -> np.ndarray:
    """Lay groups out as `SharedPrefixes.view` reads them.

    Raises:
        ValueError: more groups than there is room for.
    """
    if len(groups) > MAX_GROUPS:
        raise ValueError(f"groups must be at most {MAX_GROUPS}, not {len(groups)}")
    packed = np.zeros(packed_size(num_requests), dtype=np.int32)
    width = _align(num_requests)
    members, leaders, lens = (packed[at * width : at * width + num_requests] for at in range(3))
    leaders[:] = -1
    bounds = np.cumsum([0, *(len(requests) for requests, _ in groups)])
    packed[3 * width :] = bounds[-1]
    packed[3 * width : 3 * width + len(bounds)] = bounds
    for start, (requests, shared_len) in zip(bounds.tolist(), groups, strict=False):
        members[start : start + len(requests)] = requests
        leaders[requests] = requests[0]
        lens[requests] = shared_len
    return packed


def make_shared(groups: Sequence[Group], num_requests: int, device: torch.device) -> SharedPrefixes:
    """Put groups on a device; waits for the copy."""
    packed = torch.from_numpy(pack_groups(groups, num_requests)).to(device)
    return SharedPrefixes.view(packed, num_requests)


def _align(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
