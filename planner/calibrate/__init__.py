"""The command `python -m planner calibrate`: it measures the rates of this machine, by which plans predict times.

A new rate is a field of `planner.cost.device.Device` and a measurement in `measurements.py`, and a new framework or
device is a `Lab` in `labs.py`; a rate counts only if `predictions.py` shows that it predicts measured times.
"""
