"""`group`: prepare an index array once and use it in many calls. `synchronize`: raise what cards tell of indices."""

from __future__ import annotations

import operator
import sys
from typing import Any

from planner.language.errors import PlannerError
from planner.language.options import check_index_mode
from planner.language.spec import is_symbol
from planner.program.frameworks import framework_of, jax_array_of, load_backend
from planner.run import for_dynamo, torch_compiles


def group(q: Any, size: int, index_mode: str = "raise") -> Any:
    """Prepare an index array: check its range and sort its rows by group, once for many calls.

    Example:
        >>> import numpy as np
        >>> import planner
        >>> q = planner.group(np.array([1, 0, 1]), 2)
        >>> planner.contract("nj, q[n]j -> n", np.ones((3, 2)), np.ones((2, 2)), q=q)
        array([2., 2., 2.])

    Args:
        q: an index array of any integer dtype and shape.
        size: size of the dimension that the array will index.
        index_mode: as in `contract`. The calls that use the prepared array must have the same mode.

    Returns:
        The prepared index array. Pass it to `contract` or to a plan in place of `q`. In JAX it is a pytree. In torch it
        is a module: as an attribute of a module it moves with `.to()`, and is saved in the `state_dict`.

    Raises:
        IndexRangeError: an index is out of range under ``index_mode="raise"``.
        PlannerError: `q` is not an array of integers.
    """
    if torch_compiles():
        return for_dynamo().group(q, size, index_mode)
    q = jax_array_of(q)
    framework, asked = framework_of(q), size
    if is_symbol(size):
        raise PlannerError(
            f"group prepares an index array for one size, but the dimension has the symbolic size {size}: pass the "
            "index array itself to the call"
        )
    if framework is None:
        raise PlannerError(f"group takes an index array of torch, jax or numpy, not a {type(q).__name__}")
    try:
        size = -1 if isinstance(size, bool) else operator.index(size)
    except TypeError:
        size = -1
    if size < 0:
        raise PlannerError(f"group needs the size of the indexed dimension as a non-negative int, not {asked!r:.80}")
    check_index_mode(index_mode)
    backend = load_backend(framework)
    backend.check_index("q", q)
    return backend.group(q, size, index_mode)


def synchronize(*, every_call: bool | None = None) -> None:
    """Wait until cards have checked all index arrays that they were given, and raise the error of a bad one.

    In torch on CUDA a call does not wait for the card to check its index arrays. If an index is out of range under
    ``index_mode="raise"``, what it has a say in becomes NaN, and the `IndexRangeError` is raised here, or in a later
    call or backward pass, or at the end of the program. On a CPU, in JAX and in NumPy this does nothing.

    Example:
        >>> import numpy as np
        >>> import planner
        >>> y = planner.contract("nj, q[n]j -> n", np.ones((3, 2)), np.ones((2, 2)), q=np.array([1, 0, 1]))
        >>> planner.synchronize()  # y was made from indices in range

    Args:
        every_call: if given, whether later calls wait for their own indices to be checked and raise the error
            themselves, before they compute. It holds for the whole process; it begins as False.

    Raises:
        IndexRangeError: an index array had an entry out of range. The message names the array and the position.
    """
    if "torch" in sys.modules:
        backend: Any = load_backend("torch")
        backend.synchronize(every_call)
