"""The observatory: what the engine does now, drawn, and one request's masks, step by step."""

from app.ui.observatory.tab import build_observatory_tab

__all__ = ["build_observatory_tab"]
