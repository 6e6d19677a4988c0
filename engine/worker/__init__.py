"""The room that owns the device: one thread runs everything here."""
