"""Ways to show a plan."""
