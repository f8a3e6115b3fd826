"""The tile lab: an HTML page that counts the bytes of any problem with the package's formulas."""
