"""What crosses a process boundary: messages encoded as frames of bytes."""
