"""LoadedModel: the weights, and what lives as long as they do: adapters, drafter, other ranks, moves to native ops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from engine.config import EngineConfig
from engine.device.kv_cache import DTYPES
from engine.device.native_swap import NativeSwap
from engine.device.ops_choice import start_ops
from engine.device.weight_moves import list_tensors, move_tensors
from engine.errors import ConfigError
from engine.host_memory import return_freed_memory
from engine.kv_cache_spec import KVCacheSpec
from engine.model import ModelConfig, load_model
from engine.model.decoder import DecoderModel
from engine.model.implementation import EncoderConfig
from engine.model.loader import BuildDecoder
from engine.model.sharding import Sharding, check_shardable
from engine.model.vision.encoder import ImageEncoder
from engine.model.weight_cache import WeightCache
from engine.parallel.adapters import PeerAdapters
from engine.parallel.leader import LeaderDecoder
from engine.parallel.load import limit_ops
from engine.parallel.ranks import Ranks
from engine.resolved_config import WorkerConfig
from engine.spec.device.drafter import Drafter
from engine.spec.device.load import load_drafter
from engine.worker.adapter_store import AdapterStore, estimate_adapter_bytes
from kernels.ops import KVCache


class LoadedModel:
    """Loads a model with its companions.

    Raises:
        ConfigError: the checkpoint, the adapters or the drafter do not fit the config.
    """

    def __init__(
        self, config: EngineConfig, worker_config: WorkerConfig, model_config: ModelConfig,
        device: torch.device,
    ) -> None:
        self._config = config
        self._worker_config = worker_config
        self._model_config = model_config
        self._device = device
        self.ranks: Ranks | None = None  # the other ranks of the model
        self.encoder: ImageEncoder | None = None  # None: the model does not see images
        self._weight_cache = WeightCache() if config.weight_cache else None
        try:
            self._load()
            self.adapters = self._make_adapters() if config.enable_lora else None
            self.drafter, draft_native = self._load_drafter()
        except BaseException:
            self.close()
            raise
        # The models that may still move to native ops.
        pairs = ((self.native, self.model), (draft_native, self.drafter))
        self.moves = [(native, model) for native, model in pairs if native and model and not native.is_over]

    @property
    def draft_specs(self) -> tuple[KVCacheSpec, ...]:
        """Content of the drafter's layers in the KV cache."""
        return () if self.drafter is None else tuple(self.drafter.kv_specs())

    @property
    def stages(self) -> list[slice]:
        layers = [] if self.ranks is None else self.ranks.layers
        return [slice(*each) for each in layers] or [slice(None)]

    @property
    def is_broken(self) -> bool:
        """Whether another rank was lost, so that the model must be loaded again."""
        return self.ranks is not None and self.ranks.is_broken

    def move_next(self, kv_caches: Sequence[KVCache], draft_caches: Sequence[KVCache]) -> bool:
        """Move one more matrix, or the caches, to the native ops. Returns False if nothing is left."""
        for native, model in self.moves:
            if native.has_move:
                native.move_next(model, kv_caches if model is self.model else draft_caches)
                return True
        self.moves = [each for each in self.moves if not each[0].is_over]
        return False

    def move_weights(self, device: torch.device) -> None:
        """Move the weights to the host or back. They stay where they are if the model's device is the host."""
        if self._device.type == "cpu":
            return
        # In one call, because a drafter may share the model's embedding.
        drafters = [] if self.drafter is None else [self.drafter]
        move_tensors(list_tensors(self.model, *drafters), device)
        if self.encoder is not None:
            self.encoder.tower.to(device)
        if device.type == "cpu" and self.adapters is not None:
            self.adapters.unbind()

    def close(self) -> None:
        """End the other ranks, and what is written in the background."""
        if self._weight_cache is not None:
            self._weight_cache.close()
        if self.ranks is not None:
            self.ranks.close()

    def count_adapter_bytes(self, on_host: bool) -> int:
        """Return the memory for adapters of `max_lora_rank`: those in host memory, or those of one step."""
        config = self._config
        count = (config.max_cpu_loras or 2 * config.max_loras) if on_host else config.max_loras
        return count * estimate_adapter_bytes(self.model, config.max_lora_rank) if config.enable_lora else 0

    def _load(self) -> None:
        config = self._worker_config
        has_codes = self._model_config.weight_format is not None
        has_ranks = self._config.num_ranks > 1
        self._dtype = DTYPES[config.dtype]
        self._num_threads = config.num_threads if has_ranks else self._config.num_threads
        # Torch computes states in chunks. Blocks outside the cache, and those of layers that share memory although
        # their heads differ, stay in the layout in which they were written.
        heads = self._model_config.head_shapes
        self._waits = has_ranks or any(self._model_config.layer_states) or self._config.host_bytes > 0
        # An encoder's vectors must not depend on when they were asked for.
        self._waits |= isinstance(self._model_config, EncoderConfig)
        self._waits |= len({(num_kv_heads, size) for _, num_kv_heads, size in heads}) > 1
        ops, self.native = start_ops(config, self._dtype, self._num_threads, has_codes, self._waits, heads)
        sharding, build = self._choose_decoder()
        self.model = load_model(
            self._config.model, dtype=self._dtype, device=self._device, load_format=self._config.load_format,
            config=self._model_config, seed=config.seed, ops=limit_ops(ops) if has_ranks else ops,
            quantization=None if config.quantization == "none" else config.quantization, sharding=sharding,
            build=build, cache=self._weight_cache,
        )
        return_freed_memory()  # loading leaves holes as large as the model
        if self.ranks is not None:
            self.ranks.wait_loaded()
        elif self._model_config.vision is not None:
            self.encoder = ImageEncoder(
                *(self._config.model, self._model_config.vision, self._dtype, self._device),
                seed=config.seed if self._config.load_format == "dummy" else None,
            )

    def _choose_decoder(self) -> tuple[Sharding, BuildDecoder]:
        """Return rank 0's part and what makes the decoder, and start the other ranks if there are any."""
        config, has_whole = self._config, self._config.enable_expert_parallel
        size, is_sliced = config.tensor_parallel_size, config.batch_invariant_tp
        if config.num_ranks == 1:
            return Sharding(is_sliced=is_sliced, has_whole_experts=has_whole), DecoderModel
        if size > 1:
            check_shardable(self._model_config, size, has_whole)
        self.ranks = ranks = Ranks(config, self._worker_config, self._model_config)
        layers = ranks.layers[0] if ranks.layers else None
        sharding = Sharding(0, size, ranks.comm, is_sliced, has_whole, layers)
        return sharding, partial(LeaderDecoder, ranks=ranks)

    def _make_adapters(self) -> AdapterStore:
        if not self.model.matrix_parts:
            raise ConfigError(
                "enable_lora: adapters need a model of our decoder, not one on transformers' code"
            )
        peers = None if self.ranks is None else PeerAdapters(self.ranks)
        max_bytes = self.count_adapter_bytes(on_host=True)
        return AdapterStore(self.model, self._config.max_lora_rank, max_bytes, peers)

    def _load_drafter(self) -> tuple[Drafter | None, NativeSwap | None]:
        speculative = self._config.read_speculative()
        if speculative is None or speculative.device_method is None:
            return None, None
        # Ops of its own: native ops keep what they computed for one model.
        ops, native = start_ops(self._worker_config, self._dtype, self._num_threads, waits=self._waits)
        drafter = load_drafter(speculative, self.model, ops, self._device)
        if drafter is not None:
            self.model.aux_layers = drafter.aux_layers
        return drafter, native
