"""planner/program."""
