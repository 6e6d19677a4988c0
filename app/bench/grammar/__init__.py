"""Grammar benchmarks, compared with other engines."""
