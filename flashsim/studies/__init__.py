"""What one learns: ladder, reproduce, verify, predict, roofline, demo."""
