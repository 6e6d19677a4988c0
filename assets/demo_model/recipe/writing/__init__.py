"""What is written for training: documents of eight kinds, invented schemas, small worlds, dialogues."""
