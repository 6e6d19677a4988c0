"""Drafters on the device: a draft model, EAGLE heads, MTP layers. The executor thread runs them after sampling."""
