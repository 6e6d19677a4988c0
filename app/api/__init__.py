"""The OpenAI-compatible API over one engine: thin routes, plain translation modules."""
