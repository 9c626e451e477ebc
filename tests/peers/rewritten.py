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


def _array(operand: Any) -> Any:
    """Operands are arrays: Python's numbers and lists go through numpy.asarray first."""
    return np.asarray(operand) if isinstance(operand, (bool, int, float, complex, list, tuple)) else operand


def _options(given: dict[str, Any], operands: int | None) -> dict[str, Any]:
    """Options of theirs as ours, of a call on so many operands; what has no rule is left for `planner` to refuse."""
    options = dict(given)
    # There is no use_blas=: what a step runs as is chosen by its cost.
    options.pop("use_blas", None)
    # There is no backend=: operands say whose they are; backend='jax' of NumPy's converts there and back.
    if options.get("backend") in ("torch", "jax"):
        del options["backend"]
    # A path has no 'einsum_path' at its head; without a search one step over all operands is the path.
    optimize = options.get("optimize", "auto")
    if optimize is True:
        options["optimize"] = "auto"
    elif (optimize is False or optimize is None) and operands is not None:
        options["optimize"] = [tuple(range(operands))]
    elif isinstance(optimize, list) and optimize[:1] == ["einsum_path"]:
        options["optimize"] = optimize[1:]
    return options


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


def _into(out: Any, result: Any, casting: str = "same_kind") -> Any:
    """There is no out=: the result is copied into it."""
    if out is None:
        return result
    np.copyto(out, result, casting=casting)  # type: ignore[arg-type]
    return out


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


class Contract:
    """`numpy.einsum` or `opt_einsum.contract`, whichever is `theirs`, in our words."""

    def __init__(self, theirs: Callable[..., Any]) -> None:
        self.theirs = theirs

    def __call__(self, *given: Any, out: Any = None, **options: Any) -> Any:
        operands, placed = _parts(given)
        operands = [_array(x) for x in operands]
        ours = _options(options, len(operands))
        # There is no casting=: with casting='unsafe' operands are cast to dtype= first.
        if ours.get("casting") == "unsafe" and "dtype" in ours:
            del ours["casting"]
            operands = [x.astype(ours["dtype"]) for x in operands]

        result = _run(operands, lambda arrays: contract(*placed(arrays), **ours), options.get("backend"))
        hold(result, lambda: self.theirs(*given, **options))
        return _into(out, result, options.get("casting", "same_kind"))


class Expression:
    """`opt_einsum.contract_expression`, as a plan: of float64 at first, and anew where other arrays come.

    A plan has no constants: they are passed at each call, in their places.
    """

    def __init__(self, *given: Any, constants: Sequence[int] = (), **options: Any) -> None:
        shapes, self.placed = _parts(given)
        self.options = _options(options, None)
        self.constants = {n: shapes[n] for n in constants}
        stands = [x if n in self.constants else planner.Operand(x, "float64") for n, x in enumerate(shapes)]
        self.plan = self._plan(stands, backend=None if self.constants else "numpy")

    def _plan(self, operands: Sequence[Any], **more: Any) -> planner.Plan:
        calls.append("plan")
        return planner.plan(*self.placed(operands), **self.options, **more)

    def __call__(self, *arrays: Any, out: Any = None, backend: str | None = None) -> Any:
        operands = [_array(x) for x in arrays]
        for n in sorted(self.constants):
            operands.insert(n, self.constants[n])
        result = _run(operands, self._run, backend)
        hold(result, lambda: opt_einsum.contract(*self.placed(operands), backend=backend or "auto"))
        return _into(out, result)

    def _run(self, operands: Sequence[Any]) -> Any:
        kinds = [(framework_of(x), x.dtype.name) for x in operands if framework_of(x) != "torch"]
        if kinds == [(self.plan.backend, x.dtype) for x in self.plan.operands]:
            return self.plan(*operands)
        return self._plan(operands)(*operands)

    def __str__(self) -> str:
        return str(self.plan)

    def __repr__(self) -> str:
        return repr(self.plan)


def contract_path(*given: Any, shapes: bool = False, **options: Any) -> tuple[list[Any], planner.Plan]:
    """`opt_einsum.contract_path`, as a plan and its path."""
    operands, placed = _parts(given)
    ours = _options(options, len(operands))
    calls.append("plan")
    plan = planner.plan(*placed(operands if shapes else [_array(x) for x in operands]), **ours)
    return list(plan.path), plan


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


EINSUM, CONTRACT = Contract(np.einsum), Contract(opt_einsum.contract)
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
