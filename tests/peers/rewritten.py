"""How calls of numpy.einsum and opt_einsum are written with `planner`, and what takes the place of which name.

Each call that is redirected is also made as its author meant it, and the two results are held to each other: shape,
dtype and values. So a test that compares two calls of what it tests never compares `planner` with `planner` alone.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import opt_einsum
from opt_einsum import parser

import planner
from planner.program.frameworks import framework_of

# memory_limit= of theirs counts elements of the largest intermediate, ours all bytes that are allocated at any moment:
# no number of one is a number of the other, and no test of these suites passes it to a call.

# What of ours was called: strict.py clears it before each test.
calls: list[str] = []


def _parts(given: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], tuple[Any, ...]]]:
    """The operands of a call, and the function that puts others in their places."""
    if given and isinstance(given[0], str):
        return list(given[1:]), lambda operands: (given[0], *operands)
    pairs = len(given) // 2 * 2
    lists, output = given[1:pairs:2], given[pairs:]
    return list(given[0:pairs:2]), lambda operands: (*itertools.chain(*zip(operands, lists, strict=True)), *output)


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Options of opt_einsum's as ours; what has no rule is left for `planner` to refuse."""
    # There is no use_blas= and no backend=: what a step runs as is chosen by its cost, operands say whose they are.
    return {name: value for name, value in given.items() if name not in ("use_blas", "backend")}


# Both sides round, each in its own order of sums.
_CLOSE = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-4, "complex64": 1e-4}


def hold(ours: Any, theirs: Callable[[], Any]) -> None:
    """Hold a result to theirs: equal in shape and dtype, and in value but for rounding."""
    if "Tracer" in type(ours).__name__:
        return
    try:
        wanted = theirs()
    except (ValueError, TypeError, RuntimeError):
        return  # what theirs refuses and ours takes: whether that is a fault, the test says
    have, want = (np.asarray(x.detach() if framework_of(x) == "torch" else x) for x in (ours, wanted))
    assert_close(have, want, 0.0 if have.dtype.kind in "biu" else _CLOSE.get(have.dtype.name, 1e-9))


def assert_close(have: Any, want: Any, close: float) -> None:
    """Equal in shape and dtype, and in value but for so much of the largest number."""
    assert (have.shape, have.dtype) == (want.shape, want.dtype)
    have, want = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) if close else x for x in (have, want))
    np.testing.assert_allclose(have, want, rtol=close, atol=close * float(np.abs(want).max(initial=0)) if close else 0)


def _run(operands: Sequence[Any], run: Callable[[Sequence[Any]], Any], backend: Any) -> Any:
    """Run on the operands, or if so asked on JAX's arrays of NumPy's values."""
    if backend != "jax" or any(framework_of(x) != "numpy" for x in operands):
        return run(operands)
    from jax import numpy as jnp

    return np.asarray(run([jnp.asarray(x) for x in operands]))


def contract(*given: Any, **options: Any) -> Any:
    """`planner.contract`, counted."""
    calls.append("contract")
    return planner.contract(*given, **options)


def einsum(*given: Any, **options: Any) -> Any:
    """`planner.einsum`, counted."""
    calls.append("einsum")
    return planner.einsum(*given, **options)


class Einsum:
    """`numpy.einsum` or `opt_einsum.contract`, whichever is `theirs`."""

    def __init__(self, theirs: Callable[..., Any]) -> None:
        self.theirs = theirs

    def __call__(self, *given: Any, **options: Any) -> Any:
        operands, placed = _parts(given)
        out, before = options.get("out"), [np.array(x) if framework_of(x) == "numpy" else x for x in operands]
        own = _options(options)
        result = _run(operands, lambda arrays: einsum(*placed(arrays), **own), options.get("backend"))
        # Theirs reads what operands were, and writes into another array.
        other = {} if out is None else {"out": out.copy()}
        overlaps = any(np.may_share_memory(x, out) for x in operands if framework_of(x) == "numpy" and out is not None)
        hold(result, lambda: self.theirs(*placed(before if overlaps else operands), **{**options, **other}))
        return result


class Expression:
    """`opt_einsum.contract_expression`, as ours."""

    def __init__(self, *given: Any, constants: Sequence[int] = (), **options: Any) -> None:
        calls.append("contract_expression")
        shapes, self.placed = _parts(given)
        self.constants = {n: shapes[n] for n in constants}
        self.ours = planner.contract_expression(*given, constants=constants, **_options(options))

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        result = self.ours(*arrays, **options)
        operands = list(arrays)
        for n in sorted(self.constants):
            operands.insert(n, self.constants[n])
        hold(result, lambda: opt_einsum.contract(*self.placed(operands), backend=options.get("backend", "auto")))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ours, name)

    def __str__(self) -> str:
        return str(self.ours)

    def __repr__(self) -> str:
        return repr(self.ours)


def contract_path(*given: Any, **options: Any) -> Any:
    """`opt_einsum.contract_path`, as ours."""
    calls.append("contract_path")
    return planner.contract_path(*given, **_options(options))


def parse_einsum_input(given: Sequence[Any], shapes: bool = False) -> tuple[str, str, list[Any]]:
    """`opt_einsum.parser.parse_einsum_input`, as a resolved spec, its terms joined."""
    operands, placed = _parts(given)
    calls.append("resolve")
    spec = planner.resolve(*placed(operands))
    return ",".join("".join(map(str, term)) for term in spec.inputs), "".join(map(str, spec.output)), operands


class _Numpy(types.ModuleType):
    """NumPy, with another einsum."""

    def __init__(self, einsum: Callable[..., Any]) -> None:
        super().__init__("numpy")
        self.einsum = einsum

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def jax_einsum() -> Einsum:
    """`jnp.einsum`."""
    from jax import numpy as jnp

    return Einsum(jnp.einsum)


EINSUM, CONTRACT = Einsum(np.einsum), Einsum(opt_einsum.contract)
_CALLS = {"contract": CONTRACT, "contract_path": contract_path, "contract_expression": Expression}

# By module of tests: what its names are from now on. `numpy.einsum_path` and what builds operands stay theirs.
REDIRECTED: dict[str, dict[str, Any]] = {
    "opt_einsum.tests.test_contract": _CALLS,
    "opt_einsum.tests.test_input": {name: _CALLS[name] for name in ("contract", "contract_path")},
    "opt_einsum.tests.test_edge_cases": _CALLS,
    "opt_einsum.tests.test_backends": {name: _CALLS[name] for name in ("contract", "contract_expression")},
    "opt_einsum.tests.test_parser": {"parse_einsum_input": parse_einsum_input},
    "numpy._core.tests.test_einsum": {"np": _Numpy(EINSUM)},
}
# The same where a test takes what it tests as a parameter.
PARAMETERS = {
    np.einsum: EINSUM,
    opt_einsum.contract: CONTRACT,
    opt_einsum.contract_path: contract_path,
    parser.parse_einsum_input: parse_einsum_input,
}
