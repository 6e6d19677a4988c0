"""The synchronous machines. They import neither asyncio nor torch."""
