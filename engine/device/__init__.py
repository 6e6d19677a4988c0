"""One device: its link, its memory, its kernels, and the KV cache on it. Workers and ranks use them."""
