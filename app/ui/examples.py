"""The example schemas and texts that come with the app; both folders may be empty."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine import Engine, EngineConfig

ASSETS = Path(__file__).resolve().parents[2] / "assets"
SAMPLE_SUFFIXES = (".txt", ".md", ".eml", ".csv", ".log", ".html", ".xml")


@dataclass(frozen=True, slots=True)
class Examples:
    """Example files by the name that is shown."""

    schemas: dict[str, str]  # name -> JSON Schema text
    samples: dict[str, Path]

    def schema_for(self, sample: str) -> str | None:
        """The schema whose name begins the sample's, as in invoice and invoice_01."""
        fitting = [name for name in self.schemas if sample.startswith(name)]
        return max(fitting, key=len, default=None)


def load_examples(assets: Path = ASSETS) -> Examples:
    """Read the names of all examples, and the schemas."""
    schemas = {show_name(path): path.read_text(encoding="utf-8") for path in sorted(assets.glob("schemas/*.json"))}
    samples = {show_name(path): path for path in sorted(assets.glob("samples/**/*")) if path.suffix in SAMPLE_SUFFIXES}
    return Examples(schemas, samples)


def show_name(path: Path) -> str:
    return path.stem.replace("_", " ").replace("-", " ")


def is_demo_model(engine: Engine) -> bool:
    return engine.config.model == EngineConfig().model
