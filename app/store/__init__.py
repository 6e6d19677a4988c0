"""What the server keeps: chats, projects, jobs and their rows, files, stored responses."""

from app.store.database import Connection, Limits, Store, StoreError, StoreFull, open_store
from app.store.objects import Item

__all__ = ["Connection", "Item", "Limits", "Store", "StoreError", "StoreFull", "open_store"]
