"""Failure: what went wrong although the user asked for something possible; exit code 1."""


class Failure(Exception):
    """The message is one line for the user."""
