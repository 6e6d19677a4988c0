"""Residual checks: what no engine enforces is checked at the token that completes a value."""
