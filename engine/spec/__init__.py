"""Speculative decoding: proposers of draft tokens, which the model verifies."""
