"""From text to a checked record: prompt, limits, confidence and evidence. The UI, the CLI and the API share it."""

from app.extraction.batch import extract_records
from app.extraction.bounds import Bound, BoundedSchema, Limits, add_bounds, describe_added
from app.extraction.extractor import ExtractionResult, Extractor, PartialExtraction, TextTooLong
from app.extraction.grounding import Evidence
from app.extraction.json_spans import Leaf
from app.extraction.prompt import Schema, make_messages
from app.extraction.sources import Source

__all__ = [
    "Bound",
    "BoundedSchema",
    "Evidence",
    "ExtractionResult",
    "Extractor",
    "Leaf",
    "Limits",
    "PartialExtraction",
    "Schema",
    "Source",
    "TextTooLong",
    "add_bounds",
    "describe_added",
    "extract_records",
    "make_messages",
]
