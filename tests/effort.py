"""How many random examples a test tries: few in `make test`, many where TESTS_THOROUGH is set, as in `make soak`."""

import os


def choose_count(quick: int, thorough: int) -> int:
    return thorough if os.environ.get("TESTS_THOROUGH") else quick
