"""DiLaServe's planner."""
