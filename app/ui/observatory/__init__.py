"""The observatory: what the engine does now, drawn, and one request's masks, step by step."""
