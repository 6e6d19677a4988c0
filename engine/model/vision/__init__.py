"""Images: the vision parts of models, which are transformers' modules, around our decoder."""
