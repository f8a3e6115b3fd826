"""Animations."""
