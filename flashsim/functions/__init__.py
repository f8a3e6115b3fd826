"""Score and mask functions as expression graphs: traced, emitted, differentiated, bounded."""
