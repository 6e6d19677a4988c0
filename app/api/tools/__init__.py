"""Tool calls: the tools of a request, the formats of models, and the calls in replies."""
