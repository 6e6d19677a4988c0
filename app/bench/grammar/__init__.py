"""Grammars: their speed beside the peers, what models write under them, what they do to their neighbours."""
