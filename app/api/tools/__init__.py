"""Tool calls: which tools a request has, how models write calls, and how calls are told."""
