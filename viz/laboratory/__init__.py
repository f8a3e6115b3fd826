"""The tile lab: one HTML page that counts any problem, from the package's own closed forms."""
