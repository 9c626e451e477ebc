"""The public names for rows of your own. They are defined in `planner.program.implementations`."""

from planner.program.implementations import Backend, Implementation, Lowering, Stepwise, Table

__all__ = ["Backend", "Implementation", "Lowering", "Stepwise", "Table"]
