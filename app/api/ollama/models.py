"""Ollama's lists of models: /api/tags, /api/ps, /api/show, and /api/version."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from app.api.context import ApiContext, Context, JsonRoute
from app.api.errors import BadRequest
from app.api.model_pool import Pool
from app.api.ollama.request import ModelName, own_model
from app.api.ollama.writer import show_time
from engine import CatalogueEntry, ModelReport

router = APIRouter(route_class=JsonRoute)
Json = dict[str, Any]

FOREVER = "9999-12-31T23:59:59Z"  # the model is never unloaded
OLLAMA_VERSION = "0.12.0"  # whose routes these are; clients such as Copilot refuse a server below 0.6.4


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
    details = describe_details(context, context.report)
    abilities = [each for each in can if can[each]]
    reply = make_shown(context, name, details, context.engine.resolved.max_model_len, abilities)
    reply["template"] = "" if tokenizer is None else tokenizer.describe()["chat_template"] or ""
    reply["model_info"]["general.parameter_count"] = context.report.num_parameters
    return reply


@router.get("/version")
async def show_version() -> dict[str, str]:
    """Return the version of Ollama whose routes these are, which clients compare with what they need."""
    return {"version": OLLAMA_VERSION}


def describe_model(name: str, context: ApiContext, report: ModelReport) -> Json:
    """Return an entry of the lists of models."""
    details = describe_details(context, report)
    return make_listed(context, name, context.system_fingerprint, report.weight_bytes, details)


def describe_entry(entry: CatalogueEntry, context: ApiContext) -> Json:
    """Return the same for a further model."""
    details = make_details(entry.format, entry.architecture)
    return make_listed(context, entry.name, entry.model, entry.num_bytes, details)


def show_entry(entry: CatalogueEntry, context: ApiContext) -> Json:
    """Return the reply of /api/show for a further model."""
    details = make_details(entry.format, entry.architecture)
    can = ["completion", *["vision"] * ("image" in entry.modalities)]
    return make_shown(context, entry.name, details, entry.context_length, can) | {"license": entry.license or ""}


def describe_details(context: ApiContext, report: ModelReport) -> Json:
    """Return what a list of models says of each."""
    config, num = context.engine.config, report.num_parameters
    size = f"{num / 1e9:.1f}B" if num >= 1e9 else f"{num / 1e6:.1f}M"
    level = report.weight_format if config.quantization == "none" else config.quantization
    return make_details("gguf" if config.model.endswith(".gguf") else "safetensors", report.architecture, size, level)


def make_details(file_format: str, family: str, size: str = "", level: str = "") -> Json:
    return {
        "parent_model": "", "format": file_format, "family": family, "families": [family], "parameter_size": size,
        "quantization_level": level,
    }


def make_listed(context: ApiContext, name: str, identity: str, num_bytes: int, details: Json) -> Json:
    """Return an entry. It has a tag, because open-webui adds one to a chosen name and looks that up in the list."""
    digest = hashlib.sha256(f"{name} {identity}".encode()).hexdigest()
    tagged = name if ":" in name else f"{name}:latest"
    return {
        "name": tagged, "model": tagged, "modified_at": show_time(context.created), "digest": digest, "size": num_bytes,
        "details": details,
    }


def make_shown(context: ApiContext, name: str, details: Json, length: int | None, can: list[str]) -> Json:
    family = details["family"]
    return {
        "modelfile": "", "parameters": "", "license": "", "template": "", "details": details,
        "model_info": {
            "general.architecture": family, "general.basename": name.removesuffix(":latest"),
            f"{family}.context_length": length,
        },
        "capabilities": can, "modified_at": show_time(context.created),
    }
