"""Functions that turn traces into drawable data."""
