"""Regexes: their syntax, what they cost as automata, and matching whole texts in linear time."""
