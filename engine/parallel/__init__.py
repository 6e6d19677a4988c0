"""One model over several ranks: processes that each hold a part of every matrix."""
