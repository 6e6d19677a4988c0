"""Speculative decoding: proposers of draft tokens, and the rule for how many are verified."""
