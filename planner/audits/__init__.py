"""Audits of programs: which products and reads of rows a model runs, what they cost, and what to write instead.

Watchers turn calls of a framework into expressions, and only `report` plans them. A new call that should be seen is a
row in a table of a watcher.
"""
