"""Scheduler and Router under a virtual clock, with step times measured on the model."""
