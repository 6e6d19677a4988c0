"""Writers of training texts: documents of eight kinds, invented schemas, small worlds, dialogues."""
