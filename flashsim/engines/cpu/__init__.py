"""The fast CPU engine."""
