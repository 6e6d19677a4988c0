"""The API of Anthropic's clients: its messages, its request, its events."""
