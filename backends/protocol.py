"""The public names for rows of your own; they are defined in `planner.program.implementations`."""

from planner.program.implementations import Backend, Lowering, Stepwise, Table

__all__ = ["Backend", "Lowering", "Stepwise", "Table"]
