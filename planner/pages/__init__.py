"""Pictures of plans: self-contained HTML pages, drawings in matplotlib, graphs for Mermaid and Graphviz, traces.

Nothing here plans or runs. A new picture reads the records of `figures` and adds a section to `plan_page`.
"""
