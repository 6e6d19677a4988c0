"""The chat tab: its conversation and versions, what the browser keeps of it, its settings."""
