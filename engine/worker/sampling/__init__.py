"""Sampling: from a batch of logits to tokens, with what each request asks of them."""
