"""The extraction tab: the schema, the record beside its evidence, the review."""
