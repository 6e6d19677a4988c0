"""Runs the code of transformers for models that no family describes, over the paged KV cache."""
