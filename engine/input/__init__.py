"""Request input: validation, chat messages, tokenisation."""
