"""Studies that use flashsim to teach and check: lessons, reproduced papers, predicted times."""
