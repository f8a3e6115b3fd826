"""Studies that teach and check: lessons, reproduced papers, verification, predicted times."""
