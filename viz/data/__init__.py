"""From traces to what is drawn."""
