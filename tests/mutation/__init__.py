"""Mutation testing: change one place of the source at a time and see whether a test fails."""
