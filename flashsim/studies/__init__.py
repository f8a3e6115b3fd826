"""Studies that teach and check: ladder, reproduce, verify, predict, roofline, demo."""
