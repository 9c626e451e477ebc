"""The demo, `python -m planner demo`: it runs what the authors of four documents wrote, beside `planner.contract`.

Keep the authors' code in `ways.py` as they wrote it; new comparisons go into `cases.py`, and answers to the authors'
questions into `answers.py`.
"""
