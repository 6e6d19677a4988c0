"""Speculative decoding: who proposes tokens that the model has only to confirm."""
