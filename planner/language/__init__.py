"""planner/language."""
