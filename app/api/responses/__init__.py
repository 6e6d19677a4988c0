"""OpenAI's Responses API: its input items, its request, its events."""
