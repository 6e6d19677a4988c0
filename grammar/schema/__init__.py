"""JSON Schema: dialects, equivalence-preserving rewrites, and the analysis of who enforces what."""
