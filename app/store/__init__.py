"""What the server keeps: chats, projects, jobs and their rows, files, stored responses."""

from app.store.database import Connection, DiskFull, Limits, Store, StoreError, StoreFull, open_store
from app.store.objects import Item

__all__ = ["Connection", "DiskFull", "Item", "Limits", "Store", "StoreError", "StoreFull", "open_store"]
