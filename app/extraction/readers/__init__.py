"""Readers of files that run in a process of their own (main.py), because a hostile file could crash or block them."""
