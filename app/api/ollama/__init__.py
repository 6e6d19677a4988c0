"""Ollama's API: its request, its messages, its answers, its lists of models."""
