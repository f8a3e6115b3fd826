"""The simulated machine that executes a user's own algorithm and counts every byte."""
