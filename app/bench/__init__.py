"""Benchmarks. Each prints what it measured, next to the machine it measured it on."""
