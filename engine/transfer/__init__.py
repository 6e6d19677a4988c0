"""KV blocks outside the KV cache: in host memory, and in stores that several cores share."""
