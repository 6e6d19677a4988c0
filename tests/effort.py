"""How much a test tries: little in `make test`, more where TESTS_THOROUGH is set, as `make soak` does."""

import os


def choose_count(quick: int, thorough: int) -> int:
    return thorough if os.environ.get("TESTS_THOROUGH") else quick
