"""Plots of traces, counts and predictions."""
