"""DiLaServe's gpu-worker."""
