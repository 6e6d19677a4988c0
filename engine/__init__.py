"""Troupe's engine: `Engine` for asyncio programs, `LLM` for everyone else.

A name is imported when it is first used: torch and transformers take seconds, and flags need `EngineConfig` alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineSleeping,
    InvalidRequest,
    LeaseRefused,
    PromptTooLong,
    RequestTimeout,
)
from engine.resolved_config import ResolvedConfig

if TYPE_CHECKING:
    from engine.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from engine.catalogue import Catalogue, CatalogueEntry
    from engine.cluster.ray_placement import serve_headless
    from engine.embedder import Classification, Embedder, Embedding, Score
    from engine.engine import Engine
    from engine.front.adapter_catalog import LoRARequest
    from engine.front.journal_file import RecordedRequest, read_journal
    from engine.front.text_router import TextRouter
    from engine.host_memory import measure_host_memory
    from engine.input.tokenizer import Tokenizer, refuse_reserved_kwargs
    from engine.leased_engine import LeasedEngine, run_core
    from engine.llm import LLM
    from engine.metrics import EngineStats, Histogram, ReplicaStats, list_metrics
    from engine.model.report import ModelReport, inspect_model, list_families, list_image_models
    from engine.model.sampling_defaults import read_sampling_defaults
    from engine.outputs import (
        CompletionOutput,
        EngineSnapshot,
        GrammarInfo,
        Logprob,
        RequestMetrics,
        RequestOutput,
        RequestView,
        TokenLogprobs,
    )
    from engine.sampling_params import SamplingParams, is_unicode
    from engine.structured_outputs import StructuredOutputsParams
else:
    MODULES = {
        "embedder": ("Classification", "Embedder", "Embedding", "Score"),
        "catalogue": ("Catalogue", "CatalogueEntry"),
        "engine": ("Engine",),
        "host_memory": ("measure_host_memory",),
        "leased_engine": ("LeasedEngine", "run_core"),
        "llm": ("LLM",),
        "cluster.ray_placement": ("serve_headless",),
        "front.adapter_catalog": ("LoRARequest",),
        "beam_search": ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
        "structured_outputs": ("StructuredOutputsParams",),
        "front.journal_file": ("RecordedRequest", "read_journal"),
        "front.text_router": ("TextRouter",),
        "metrics": ("EngineStats", "Histogram", "ReplicaStats", "list_metrics"),
        "model.report": ("ModelReport", "inspect_model", "list_families", "list_image_models"),
        "model.sampling_defaults": ("read_sampling_defaults",),
        "outputs": (
            *("CompletionOutput", "EngineSnapshot", "GrammarInfo", "Logprob"),
            *("RequestMetrics", "RequestOutput", "RequestView", "TokenLogprobs"),
        ),
        "sampling_params": ("SamplingParams", "is_unicode"),
        "input.tokenizer": ("Tokenizer", "refuse_reserved_kwargs"),
    }

    def __getattr__(name: str) -> Any:
        for module, names in MODULES.items():
            if name in names:
                value = globals()[name] = getattr(importlib.import_module(f"engine.{module}"), name)
                return value
        raise AttributeError(f"module 'engine' has no attribute {name!r}")


__all__ = [
    "LLM", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence", "Catalogue", "CatalogueEntry",
    "Classification", "CompletionOutput", "ConfigError", "Embedder", "Embedding", "Engine", "EngineConfig",
    "EngineDead", "EngineError", "EngineOverloaded", "EngineSleeping", "EngineSnapshot", "EngineStats",
    "GrammarInfo", "Histogram", "InvalidRequest", "LeaseRefused", "LeasedEngine", "LoRARequest", "Logprob",
    "ModelReport", "PromptTooLong", "RecordedRequest", "ReplicaStats", "RequestMetrics", "RequestOutput",
    "RequestTimeout", "RequestView", "ResolvedConfig", "SamplingParams", "Score", "StructuredOutputsParams",
    "TextRouter", "TokenLogprobs", "Tokenizer", "inspect_model", "is_unicode",
    "list_families", "list_image_models", "list_metrics", "measure_host_memory", "read_journal",
    "read_sampling_defaults", "refuse_reserved_kwargs", "run_core", "serve_headless",
]  # fmt: skip
