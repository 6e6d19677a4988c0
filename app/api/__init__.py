"""The OpenAI-compatible API over one engine: thin routes, plain translation modules."""

from app.api.application import make_api
from app.api.context import ApiContext

__all__ = ["ApiContext", "make_api"]
