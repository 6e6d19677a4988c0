"""The fixed sets, and how a checkpoint is judged by them without the engine."""
