"""Models as single-device code; sharding and checkpoint names live elsewhere."""
