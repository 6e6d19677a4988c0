"""One schema in three views: a form and JSON Schema, which can be edited, and Pydantic classes, which are shown."""

from app.ui.schema.form import NotAForm, form_to_schema, schema_to_form
from app.ui.schema.pydantic_writer import NotAClass, schema_to_pydantic

__all__ = ["NotAClass", "NotAForm", "form_to_schema", "schema_to_form", "schema_to_pydantic"]
