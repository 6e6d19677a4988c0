"""One schema in three views: a form and JSON Schema, which can be edited, and Pydantic classes, which are shown."""
