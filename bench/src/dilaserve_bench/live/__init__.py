"""Load on a real stack, and the digital twin of that stack beside it."""
