"""`python -m planner calibrate`: it measures the rates of this machine, by which plans predict time.

`predictions.py` checks the predictions against the clock. The files that it writes are read by `planner.cost.rates`.
"""
