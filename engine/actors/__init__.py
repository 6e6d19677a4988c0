"""The asyncio shells around the machines: one class, one file, one task, one inbox."""
