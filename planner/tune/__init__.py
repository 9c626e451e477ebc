"""planner/tune."""
