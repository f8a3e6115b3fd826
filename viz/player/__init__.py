"""Pages that play a trace."""
