"""MockWorker: an executor that returns artificial tokens after a fixed time, to measure the engine without a model.

A token depends only on seed and position, so batches, chunks and restarts do not change a text.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from engine.config import EngineConfig
from engine.core.actor_messages import StepDone, StepMasks, StepPlan
from engine.model import read_model_config
from engine.resolved_config import WorkerConfig, resolve_config
from engine.worker.executor import Loaded
from engine.worker.sampling.drafts import SampleRuns
from kernels.torch.sampling import make_row_keys

# Tokens are in [first, first + number), which has no special tokens and single bytes in most vocabularies.
_FIRST_TOKEN = 260
_NUM_TOKENS = 150
_MEMORY_BYTES = 2**33
_BYTES_PER_BLOCK = 2**17


class MockWorker:
    """Reads the checkpoint's config, but no weights."""

    adapters = encoder = host_memory = None

    def __init__(self, config: EngineConfig) -> None:
        self.sleep_level = 0
        self.before_layers: Callable[[], None] = lambda: None
        self.take_masks: Callable[[int, np.ndarray], StepMasks | None] = lambda step_id, indices: None
        self._config = config
        self._step_s = (config.mock_step_ms or 0.0) / 1000
        self._seeds = np.zeros(config.find_step_limits("cpu")[0], dtype=np.int64)  # by row

    def load(self) -> Loaded:
        model_config = read_model_config(
            self._config.model, self._config.model_impl, self._config.read_hf_overrides()
        )
        worker = WorkerConfig(self._config.model, "dummy", "float32", "cpu", 1, 0)
        resolved = resolve_config(
            self._config, worker, model_max_len=model_config.max_model_len, free_bytes=_MEMORY_BYTES,
            bytes_per_block=_BYTES_PER_BLOCK,
            kv_specs=[spec.kv_spec for spec in model_config.layer_specs if spec.state is None],
        )
        return Loaded(resolved, model_config)

    def reset(self) -> None:
        """Do nothing: each new row sets its seed."""

    def sleep(self, level: int) -> None:
        """Set the level only; there is no memory to free."""
        self.sleep_level = level

    def wake(self) -> None:
        self.sleep_level = 0

    def get_mask_timeout(self, plan: StepPlan) -> float:
        return 0.0

    def close(self, *, frees_memory: bool = True) -> None:
        """Do nothing."""

    def describe(self) -> dict[str, str | int]:
        return {"ops": "mock"}

    def do_chore(self) -> bool:
        return False

    def execute(self, plan: StepPlan) -> StepDone:
        self.before_layers()
        if self._step_s:
            time.sleep(self._step_s)
        for new_row in plan.new_rows:
            self._seeds[new_row.row] = np.uint64(new_row.seed % 2**64).astype(np.int64)
        indices = np.flatnonzero(plan.num_samples)
        rows, ends = plan.rows[indices], plan.starts[indices] + plan.num_scheduled_tokens[indices]
        runs = SampleRuns(indices, rows, ends, plan.num_samples[indices], plan.draft_token_ids)
        keys = make_row_keys(self._seeds[runs.flat_rows], runs.positions)
        token_ids = keys[:, 0].astype(np.int64) % _NUM_TOKENS + _FIRST_TOKEN
        counts, is_kept = runs.verify(token_ids)
        return StepDone(plan.step_id, indices, counts, token_ids[is_kept])

    def sample(self, masks: StepMasks) -> None:
        """Do nothing: `execute` has sampled all rows, without masks."""
