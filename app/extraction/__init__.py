"""From a text to a checked record with confidence, evidence and flags. Page, CLI, API and Python share it."""

from app.extraction.batch import extract, extract_records
from app.extraction.bounds import Bound, BoundedSchema, Limits, add_bounds, describe_added
from app.extraction.extractor import ExtractionResult, Extractor, PartialExtraction, TextTooLong
from app.extraction.grounding import Evidence
from app.extraction.json_spans import Leaf
from app.extraction.prompt import Example, Schema, make_messages
from app.extraction.sources import Source

__all__ = [
    "Bound", "BoundedSchema", "Evidence", "Example", "ExtractionResult", "Extractor", "Leaf", "Limits",
    "PartialExtraction", "Schema", "Source", "TextTooLong", "add_bounds", "describe_added", "extract",
    "extract_records", "make_messages",
]
