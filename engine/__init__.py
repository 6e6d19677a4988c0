"""Troupe's engine: `Engine` for asyncio programs, `LLM` for everyone else."""

from engine.config import EngineConfig, ResolvedConfig
from engine.engine import Engine
from engine.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineSleeping,
    InvalidRequest,
    PromptTooLong,
    RequestTimeout,
)
from engine.llm import LLM
from engine.metrics import EngineStats, Histogram
from engine.outputs import (
    CompletionOutput,
    GrammarInfo,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from engine.sampling_params import SamplingParams, is_unicode
from engine.snapshot import EngineSnapshot, RequestView
from engine.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "EngineOverloaded",
    "EngineSleeping",
    "EngineSnapshot",
    "EngineStats",
    "GrammarInfo",
    "Histogram",
    "InvalidRequest",
    "Logprob",
    "PromptTooLong",
    "RequestMetrics",
    "RequestOutput",
    "RequestTimeout",
    "RequestView",
    "ResolvedConfig",
    "SamplingParams",
    "TokenLogprobs",
    "Tokenizer",
    "is_unicode",
]
