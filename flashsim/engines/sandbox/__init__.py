"""The simulated machine that runs a user's own algorithm and counts every byte."""
