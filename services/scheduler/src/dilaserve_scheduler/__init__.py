"""DiLaServe's scheduler."""
