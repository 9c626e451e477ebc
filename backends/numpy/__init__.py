"""backends/numpy."""
