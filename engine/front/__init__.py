"""The front: requests in flight, their streams, and the cores that compute them."""
