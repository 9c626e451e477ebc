"""What XLA makes of products and of programs. `arrangement.py` and `peak.py` are what others import."""
