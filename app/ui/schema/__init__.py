"""One schema in two views that can both be edited: a form and JSON Schema."""
