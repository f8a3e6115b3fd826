"""Studies built on flashsim, which teach and check: lessons, reproduced papers, predicted times."""
