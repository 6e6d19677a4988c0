"""PrefixGroups: finds decodes of a step that begin with the same blocks, so that attention reads those blocks once.

A group pays off if the reads it saves take longer than one extra kernel launch. A launch costs about 2.5 us, in which
an H200 reads 11 MB (4.3 TB/s). The threshold is three times that, because device caches already save some reads. This
is a model, not a measurement. Results are bit-identical with and without groups.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.worker.decode_graphs import MIN_SHARED_ROWS, list_padded_sizes
from engine.worker.input_batch import InputBatch, ModelInput
from engine.worker.sampling.transfer import upload
from kernels.shared_prefixes import MAX_GROUPS, Group, SharedPrefixes, pack_groups

# Keys in one split of a context (`min_split` of the tile tables); a shorter prefix does not fill a split.
MIN_SHARED_KEYS = 512
# Bytes of keys and values of one layer that a step must save.
MIN_SAVED_BYTES = 32 * 1024 * 1024
# Rows (group members times query heads per KV head) of one program; they share what it reads.
ROWS_PER_READ = 16


class PrefixGroups:
    """Finds the groups of each step; searches again only if the rows or their leading blocks changed.

    Args:
        batch: the input batch that holds the block tables; those of the first group are compared.
        key_bytes: size of one token's keys and values in one layer.
        min_rows: minimum number of decodes in a step; recorded steps with shared prefixes begin at this size.
        members_per_read: group members served by one read of the keys; 1 means that sharing saves nothing.
    """

    def __init__(
        self,
        batch: InputBatch,
        key_bytes: int,
        min_keys: int = MIN_SHARED_KEYS,
        min_bytes: int = MIN_SAVED_BYTES,
        min_rows: int = MIN_SHARED_ROWS,
        members_per_read: int = 2**31,
    ) -> None:
        self._batch = batch
        self._members_per_read = members_per_read
        self._min_rows = min_rows
        self._min_keys = -(-min_keys // batch.block_size) * batch.block_size
        self._min_saved_keys = -(-min_bytes // key_bytes)
        self._capacity = list_padded_sizes(batch.max_num_seqs)[-1]
        self._seen: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=np.int64))
        self._shared: SharedPrefixes | None = None

    @classmethod
    def of_cache(cls, batch: InputBatch, kv_cache: tuple[Tensor, Tensor], num_heads: int) -> PrefixGroups:
        """Build from the KV cache of one layer (all layers are alike), read by `num_heads` query heads."""
        heads_per_key = num_heads // kv_cache[0].shape[2]
        key_bytes = sum(each.stride(1) * each.element_size() for each in kv_cache)
        return cls(batch, key_bytes, members_per_read=max(1, ROWS_PER_READ // heads_per_key))

    def mark(self, step: ModelInput, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> ModelInput:
        """Return the step with its groups, if they pay off; arrays are [R] as for `make_input`."""
        decodes = np.flatnonzero(counts == 1)
        key = np.where(counts == 1, rows, -1)
        version, seen = self._seen
        if version != self._batch.version or not np.array_equal(seen, key):
            self._seen = (self._batch.version, key)
            self._shared = self._upload(self.find(rows, starts, decodes), step.input_ids.device)
        if self._shared is None:
            return step
        return replace(step, attn_metadata=replace(step.attn_metadata, shared=self._shared))

    def find(self, rows: np.ndarray, starts: np.ndarray, decodes: np.ndarray) -> list[Group]:
        """Return groups of requests with the number of keys that they share; none if that saves too little.

        Args:
            decodes: indices into `rows` of the requests with one new token.
        """
        decodes = decodes[starts[decodes] >= self._min_keys]
        if len(decodes) < self._min_rows:
            return []
        block_size, tables = self._batch.block_size, self._batch.block_tables[0]
        if int(starts[decodes].sum()) < self._min_saved_keys:
            return []
        # Requests that share this block share all blocks before it, because a block's hash covers its whole prefix.
        last = tables[rows[decodes], self._min_keys // block_size - 1]
        _, places, counts = np.unique(last, return_inverse=True, return_counts=True)
        groups: list[Group] = []
        for place in np.argsort(-counts, kind="stable")[:MAX_GROUPS].tolist():
            if counts[place] < 2:
                break
            members = decodes[places == place]
            shared_len = self._count_shared(tables[rows[members]], int(starts[members].min()))
            if shared_len >= self._min_keys:
                groups.append((members.tolist(), shared_len))
        saved = sum(
            (len(members) - -(-len(members) // self._members_per_read)) * shared_len
            for members, shared_len in groups
        )
        return groups if saved >= self._min_saved_keys else []

    def _count_shared(self, tables: np.ndarray, num_known: int) -> int:
        """Count the keys of the leading blocks that all rows share, within the first `num_known` computed keys."""
        num_blocks = num_known // self._batch.block_size
        is_same = (tables[:, :num_blocks] == tables[0, :num_blocks]).all(axis=0)
        return (num_blocks if is_same.all() else int(is_same.argmin())) * self._batch.block_size

    def _upload(self, groups: list[Group], device: torch.device) -> SharedPrefixes | None:
        if not groups:
            return None
        packed = upload(pack_groups(groups, self._capacity), device)
        return SharedPrefixes.view(packed, self._capacity)
