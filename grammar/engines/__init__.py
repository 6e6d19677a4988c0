"""The engines that enforce a grammar token by token, each behind the protocol of `backend.py`."""
