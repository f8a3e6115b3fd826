"""Animations of traces."""
