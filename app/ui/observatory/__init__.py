"""The observatory: drawings of the engine at work, and the masks of one request, step by step."""
