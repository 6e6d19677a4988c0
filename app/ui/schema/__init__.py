"""One schema in three forms: fields in a form, JSON Schema, Pydantic classes; the form and the JSON Schema can be edited."""

from app.ui.schema.form import NotAForm, form_to_schema, schema_to_form
from app.ui.schema.pydantic_writer import NotAClass, schema_to_pydantic

__all__ = [
    "NotAClass",
    "NotAForm",
    "form_to_schema",
    "schema_to_form",
    "schema_to_pydantic",
]
