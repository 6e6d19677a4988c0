"""From what callers send to a request: checked, tokenised, held to the model."""
