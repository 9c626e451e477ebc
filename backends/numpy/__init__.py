"""The backend that needs NumPy alone. It runs each step in its simplest form, and computes no gradients."""
