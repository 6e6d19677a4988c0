"""Drafters on the device: a draft model, EAGLE heads, Medusa heads. The executor thread runs them after sampling."""
