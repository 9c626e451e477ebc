"""backends/common."""
