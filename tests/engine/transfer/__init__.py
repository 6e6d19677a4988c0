"""Tests of engine/transfer."""
