"""What others build on the finished model: the adapter, the draft model, what drafts from hidden states."""
