"""A JSON Schema as a form that can be edited."""
