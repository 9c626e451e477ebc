"""`python -m planner calibrate` measures the rates of this machine; plans predict times from them.

`labs` wraps a framework on a device, `measurements` measures rates in a lab, and `command` stores them in files, which
`planner.cost.rates` reads. `predictions` compares predicted with measured times.
"""
