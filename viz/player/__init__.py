"""HTML players of traces."""
