"""Benchmarks of the kernels on this device: its ceilings, each kernel's correctness, and its share of the ceilings.

python -m tests.measure.gpu_day.kernels ceilings|checks|table --json FILE [--smoke]
"""
