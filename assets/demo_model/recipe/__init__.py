"""The recipe of the embedded demo model: synthetic documents, tokenizer, training, export, evaluation."""
