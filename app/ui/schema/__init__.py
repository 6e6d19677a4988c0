"""One schema in three forms: fields in a form, JSON Schema, Pydantic classes; each can be made from the others."""

from app.ui.schema.form import NotAForm, form_to_schema, schema_to_form
from app.ui.schema.pydantic_code import CodeError
from app.ui.schema.pydantic_reader import pydantic_to_schema
from app.ui.schema.pydantic_writer import NotAClass, schema_to_pydantic

__all__ = [
    "CodeError",
    "NotAClass",
    "NotAForm",
    "form_to_schema",
    "pydantic_to_schema",
    "schema_to_form",
    "schema_to_pydantic",
]
