"""Ollama's lists of models: /api/tags, /api/ps, /api/show, and /api/version."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from app import __version__
from app.api.context import ApiContext, Context, JsonRoute
from app.api.errors import BadRequest
from app.api.model_pool import Pool
from app.api.ollama.request import ModelName, own_model
from app.api.ollama.writer import show_time
from engine import CatalogueEntry, ModelReport

router = APIRouter(route_class=JsonRoute)
Json = dict[str, Any]

FOREVER = "9999-12-31T23:59:59Z"  # the model is never unloaded


@router.get("/tags")
async def list_models(context: Context, pool: Pool) -> Json:
    """List the models under each of their names, and adapters."""
    context.require_ready()
    found = [describe_model(name, context, context.report) for name in context.model_names]
    entries = await pool.list_entries()
    return {"models": found + [describe_entry(each, context) for each in entries.values()]}


@router.get("/ps")
async def list_running(pool: Pool) -> Json:
    """List the models whose weights are loaded."""
    found = []
    for context in pool.contexts:
        if context.engine.state == "ready":
            report, length = context.report, context.engine.resolved.max_model_len
            more = {"expires_at": FOREVER, "context_length": length, "size_vram": report.weight_bytes}
            found += [describe_model(name, context, report) | more for name in context.served_names]
    return {"models": found}


@router.post("/show")
async def show_model(body: ModelName, context: Context, pool: Pool) -> Json:
    """Return what the model is and can do; of a further model what its files say."""
    name = body.model or body.name
    if name is None:
        raise BadRequest("model is required", "model", "missing_field")
    if (entry := await pool.find(name)) is not None:
        return show_entry(entry, context)
    context.check_model(own_model(name, context))
    context.require_ready()
    tokenizer, facts = context.engine.tokenizer, context.template
    can = {
        "completion": True, "tools": facts.knows_tools, "vision": context.engine.sees_images,
        "thinking": facts.supports_reasoning,
        "embedding": (Path(context.engine.config.model) / "modules.json").is_file(),
    }
    report = context.report
    details = describe_details(context, report)
    return {
        "modelfile": "", "parameters": "", "license": "",
        "template": "" if tokenizer is None else tokenizer.describe()["chat_template"] or "",
        "details": details,
        "model_info": {
            "general.architecture": details["family"],
            "general.parameter_count": report.num_parameters,
            f"{details['family']}.context_length": context.engine.resolved.max_model_len,
        },
        "capabilities": [name for name, is_there in can.items() if is_there],
        "modified_at": show_time(context.created),
    }


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of this server."""
    return {"version": __version__}


def describe_model(name: str, context: ApiContext, report: ModelReport) -> Json:
    """Return an entry of the lists of models."""
    digest = hashlib.sha256(f"{name} {context.system_fingerprint}".encode()).hexdigest()
    return {
        "name": name, "model": name, "modified_at": show_time(context.created), "digest": digest,
        "size": report.weight_bytes, "details": describe_details(context, report),
    }


def describe_entry(entry: CatalogueEntry, context: ApiContext) -> Json:
    """Return the same for a further model."""
    details = {
        "parent_model": "", "format": entry.format, "family": entry.architecture, "families": [entry.architecture],
        "parameter_size": "", "quantization_level": "",
    }
    return {
        "name": entry.name, "model": entry.name, "modified_at": show_time(context.created),
        "digest": hashlib.sha256(f"{entry.name} {entry.model}".encode()).hexdigest(), "size": entry.num_bytes,
        "details": details,
    }


def show_entry(entry: CatalogueEntry, context: ApiContext) -> Json:
    """Return the reply of /api/show for a further model."""
    facts = {"general.architecture": entry.architecture, f"{entry.architecture}.context_length": entry.context_length}
    return {
        "modelfile": "", "parameters": "", "license": entry.license or "", "template": "",
        "details": describe_entry(entry, context)["details"], "model_info": facts,
        "capabilities": ["completion", *["vision"] * ("image" in entry.modalities)],
        "modified_at": show_time(context.created),
    }


def describe_details(context: ApiContext, report: ModelReport) -> Json:
    """Return what a list of models says of each."""
    config, num = context.engine.config, report.num_parameters
    return {
        "parent_model": "", "format": "gguf" if config.model.endswith(".gguf") else "safetensors",
        "family": report.architecture, "families": [report.architecture],
        "parameter_size": f"{num / 1e9:.1f}B" if num >= 1e9 else f"{num / 1e6:.1f}M",
        "quantization_level": report.weight_format if config.quantization == "none" else config.quantization,
    }
