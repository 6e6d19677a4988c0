"""Troupe's front of house: the web page, the OpenAI-compatible API and the command line."""

__version__ = "0.1.0"
