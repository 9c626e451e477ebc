"""planner/cost."""
