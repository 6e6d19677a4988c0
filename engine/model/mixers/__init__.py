"""What mixes the tokens of a request in a layer: attention, or a part with a state."""
