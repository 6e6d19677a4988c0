"""Images of requests: where they come from, how they are checked and decoded, and which tokens stand for them."""
