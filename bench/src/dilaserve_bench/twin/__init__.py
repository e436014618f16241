"""The digital twin: the production core over virtual instances on a virtual clock (DESIGN 8)."""
