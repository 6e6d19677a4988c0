"""Structural tags: words between tags and values inside them, in one matcher over the engines of the values."""
