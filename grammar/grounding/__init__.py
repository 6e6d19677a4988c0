"""Grounded strings: quotations from a source text, token by token."""
