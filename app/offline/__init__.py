"""Offline extraction on a Ray cluster: large tables in, one record per row out."""
