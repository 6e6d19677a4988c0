"""Benchmarks of the kernels on this device: its ceilings, each kernel's correctness, and its share of the ceilings.

python -m kernels.triton.bench ceilings|checks|table --json FILE [--smoke]
"""
