"""The page in the browser: chat, extraction, and how to reach the API. Thin handlers over Engine and Extractor."""

from app.ui.demo import make_demo
from app.ui.theme import mount_options

__all__ = ["make_demo", "mount_options"]
