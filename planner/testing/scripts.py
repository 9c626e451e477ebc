"""Python programs that show a broken law: they contain the spec and the operands as code, and print both results."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from planner.plan import Plan
from planner.testing.engines import engine_of
from planner.testing.judgement import Subject
from planner.testing.problem import Array, Problem

_IMPORTS = {"numpy": (), "torch": ("import torch",), "jax": ("import jax", "import jax.numpy as jnp")}
# Operands with more elements are drawn again from their seed, not written as code.
_MOST_ELEMENTS = 256
_WIDE = ("float64", "int64", "uint64", "complex128")


def of_values(
    framework: str, problem: Problem, subject: Subject, options: Mapping[str, Any], *, expected: bool = True
) -> str:
    """Return a program that prints a result, and the oracle's unless an error is expected."""
    lines = [f"found = {_call(problem, subject, options)}", "print('found', found, sep='\\n')"]
    if expected:
        lines += [
            "expected = reference(spec, *operands, **arguments, **indices)",
            "print('expected', expected, sep='\\n')",
        ]
    return _program(framework, problem, subject, lines)


def of_gradients(
    framework: str,
    problem: Problem,
    subject: Subject,
    options: Mapping[str, Any],
    vectors: Mapping[int, Array] | None = None,
) -> str:
    """Return a program that prints gradients, or second derivatives along some vectors, and the oracle's."""
    engine, wanted = engine_of(framework), list(problem.wanted)
    conjugate = engine.conjugates and any(d.startswith("complex") for d in problem.dtypes)
    lines = [f"engine, wanted = engine_of({framework!r}), {wanted}"]
    given = "[xs[number] for number in wanted], engine.array(gout)"
    if vectors is not None:
        lines.append(f"vectors = {{{', '.join(f'{n}: {_code(v)}' for n, v in vectors.items())}}}")
        along = ", ".join(_converted(framework, f"vectors[{n}]", problem.dtypes[n]) for n in vectors)
        given = f"{given}, [{along}]"
    lines += [
        f"function = of_some(lambda xs, qs: {_call(problem, subject, options)}, xs, qs, wanted)",
        f"found = engine.gradients(function, {given})",
        "print('found', *found, sep='\\n')",
    ]
    if conjugate:
        lines.append("operands = [x.conj() for x in operands]  # as torch has it")
    if vectors is None:
        lines.append("expected = reference_gradients(spec, gout, *operands, **arguments, **indices)")
    else:
        if conjugate:
            lines.append("vectors = {number: v.conj() for number, v in vectors.items()}")
        lines.append("expected = second_derivatives(spec, gout, operands, vectors, **arguments, **indices)")
    lines.append("print('expected', *[expected[number] for number in wanted], sep='\\n')")
    return _program(framework, problem, subject, lines)


def of_memory(framework: str, problem: Problem) -> str:
    """Return a program that prints a plan's predicted memory beside the measured one."""
    plan = f"plan = {_plan(framework, problem)}"
    return _program(framework, problem, None, [plan, "print(plan.analyze(*xs, rounds=1, **qs))"])


def of_step(framework: str, problem: Problem, number: int, lowering: str, made: Plan, *, own: bool) -> str:
    """Return a program that prints the results of one step in an implementation, and the oracle's."""
    lines = [f"plan = {_plan(framework, problem, f', minimize={made.options.minimize!r}')}"]
    if own:
        lines += [
            f"kernel = ...  # your row {lowering!r}",
            "from planner.program.frameworks import load_backend",
            f"load_backend({framework!r}).table.rows[{lowering!r}] = kernel",
        ]
    gradient = ""
    if any(problem.requires_grad) and framework != "numpy":
        lines.append(f"gradient = {_converted(framework, 'gout', made.dtype)}")
        gradient = ", gradient=gradient"
    lines += [
        f"found, expected = run_step(plan, xs, qs, {number}, {lowering!r}{gradient})",
        "print('found', *found, 'expected', *expected, sep='\\n')",
    ]
    return _program(framework, problem, None, lines)


# --- parts --------------------------------------------------------------------------------------


def vectors_of(problem: Problem) -> list[Array]:
    """Return other operands of the same shapes, along which second derivatives are taken."""
    return dataclasses.replace(problem, seed=problem.seed + 1000, strided=False).operands()


def _plan(framework: str, problem: Problem, options: str = "") -> str:
    """Return the code that plans; with stand-ins for JAX, whose arrays do not say whether they need a gradient."""
    stand_ins = ", ".join(
        f"planner.Operand({shape}, {dtype!r}, requires_grad={need})"
        for shape, dtype, need in zip(problem.shapes, problem.dtypes, problem.requires_grad, strict=True)
    )
    given = stand_ins if framework == "jax" else "*xs"
    return f"planner.plan(spec, {given}, **arguments, **qs, backend={framework!r}{options})"


def _drawn(problem: Problem) -> str:
    """Return the arguments of `Problem` that determine its operands, besides their shapes."""
    names = ("sizes", "dtypes", "seed", "max_value", "strided")
    return "indices=indices, " + ", ".join(f"{name}={getattr(problem, name)!r}" for name in names)


def _call(problem: Problem, subject: Subject, options: Mapping[str, Any]) -> str:
    """Return the code of the call, with operands `xs` and index arrays `qs`."""
    if subject.implementation is not None:
        extra = "".join(f", {name}={value!r}" for name, value in subject.keywords(problem).items())
        return f"implementation(*xs, **qs{extra})"
    if "alternative" in options:
        given = "spec, *xs, **arguments, **qs"
        return f"planner.plan({given}).alternatives()[{options['alternative']}].plan(*xs, **qs)"
    # Values without a literal, such as a PathOptimizer, must be filled in by the reader.
    texts = {name: name if repr(value).startswith("<") else repr(value) for name, value in options.items()}
    return f"planner.contract(spec, *xs, **arguments, **qs{''.join(f', {n}={t}' for n, t in texts.items())})"


def _converted(framework: str, name: str, dtype: str) -> str:
    """Return the code that converts a NumPy array to one of a framework."""
    if framework == "torch":
        return f"torch.from_numpy({name}).to(torch.{dtype})" if dtype == "bfloat16" else f"torch.from_numpy({name})"
    return f"jnp.asarray({name}, {dtype!r})" if framework == "jax" else name


def _code(x: Array) -> str:
    """Return an array as code, with its strides."""
    x = np.asarray(x)
    if not x.size:
        return f"np.zeros({x.shape}, {x.dtype.name!r})"
    if x.flags.c_contiguous:
        return f"np.array({x.tolist()}, {x.dtype.name!r})"
    reach = 1 + sum((n - 1) * s // x.itemsize for n, s in zip(x.shape, x.strides, strict=True))
    memory = np.lib.stride_tricks.as_strided(x, (reach,), (x.itemsize,))
    return f"np.lib.stride_tricks.as_strided(np.array({memory.tolist()}, {x.dtype.name!r}), {x.shape}, {x.strides})"


def _program(framework: str, problem: Problem, subject: Subject | None, lines: list[str]) -> str:
    """Return a program: imports, spec, operands and index arrays, then the given lines."""
    text = "\n".join(lines)
    operands = problem.operands()
    large = sum(x.size for x in operands) > _MOST_ELEMENTS
    used = ["Problem"] if large else []
    used += [name for name in ("reference", "reference_gradients", "run_step") if f"{name}(" in text]
    head = ["import numpy as np", *_IMPORTS[framework], "import planner"]
    if used:
        head.append(f"from planner.testing import {', '.join(used)}")
    if "engine_of(" in text:
        head.append("from planner.testing.engines import engine_of, of_some")
    if "second_derivatives(" in text:
        head.append("from planner.testing.reference import second_derivatives")
    if subject is not None and subject.implementation is not None:
        head.append(_import_of(subject.implementation))
    if "optimize=optimize" in text:
        head.append("optimize = ...  # yours")
    if framework == "jax" and any(d in _WIDE for d in problem.dtypes):
        head.append("jax.config.update('jax_enable_x64', True)")
    arguments = {"sizes": problem.sizes, "index_mode": problem.index_mode}
    converted = [_converted(framework, f"operands[{n}]", d) for n, d in enumerate(problem.dtypes)]
    if framework == "torch":
        converted = [
            f"{x}.requires_grad_()" if need else x for x, need in zip(converted, problem.requires_grad, strict=True)
        ]
    body = [
        f"spec = {problem.spec!r}",
        f"indices = {{{', '.join(f'{name!r}: {_code(q)}' for name, q in problem.indices.items())}}}",
        *(
            [f"operands = Problem({problem.spec!r}, {problem.shapes}, {_drawn(problem)}).operands()"]
            if large
            else ["operands = [", *(f"    {_code(x)}," for x in operands), "]"]
        ),
        f"arguments = {arguments!r}",
        f"xs = [{', '.join(converted)}]",
        f"qs = {{name: {_converted(framework, 'q', '')} for name, q in indices.items()}}".replace(", ''", ""),
    ]
    if "gout" in text:
        body.append(f"gout = {_code(problem.output_gradient())}")
    return "\n".join([*head, "", *body, "", *lines, ""])


def _import_of(implementation: Callable[..., Any]) -> str:
    """Return the code that imports a function, or a placeholder if its module does not have it by name."""
    module, name = getattr(implementation, "__module__", None), getattr(implementation, "__qualname__", "")
    if module not in (None, "__main__") and getattr(sys.modules.get(module or ""), name, None) is implementation:
        return f"from {module} import {name} as implementation"
    return "implementation = ...  # yours"
