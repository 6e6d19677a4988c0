"""Grammars: their speed beside the peers."""
