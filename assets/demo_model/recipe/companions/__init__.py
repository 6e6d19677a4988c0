"""Companions trained on the finished model: the adapter, the draft model, the EAGLE layer."""
