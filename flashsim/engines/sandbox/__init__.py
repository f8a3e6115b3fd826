"""Who executes an algorithm of one's own: the simulated machine, on which no byte is free."""
