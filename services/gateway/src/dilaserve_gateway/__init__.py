"""DiLaServe's gateway."""
