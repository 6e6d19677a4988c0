"""From examples to weights: tokenizer, batches, model, optimizer, export."""
