"""Adapters (LoRA): read from PEFT folders, identified by their content, kept in memory, applied to rows of a step."""
