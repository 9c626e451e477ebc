"""Python programs that show a broken law: they contain the spec and the operands as code, and print both results."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from planner.plan import Plan
from planner.testing.judgement import Subject
from planner.testing.problem import Array, Problem

__all__ = ["of_gradients", "of_memory", "of_second", "of_step", "of_values", "vectors_of"]

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


def of_gradients(framework: str, problem: Problem, subject: Subject, options: Mapping[str, Any]) -> str:
    """Return a program that prints gradients, and the oracle's."""
    return _derived(framework, problem, subject, options, twice=False)


def of_second(framework: str, problem: Problem, subject: Subject, options: Mapping[str, Any]) -> str:
    """Return a program that prints second derivatives; the oracle's sum gradients with one operand replaced."""
    return _derived(framework, problem, subject, options, twice=True)


def of_memory(framework: str, problem: Problem) -> str:
    """Return a program that prints a plan's predicted memory beside the measured one."""
    plan = f"plan = {_plan(framework, problem)}"
    return _program(framework, problem, None, [plan, "print(plan.analyze(*xs, rounds=1, **qs))"], needs_gradients=True)


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
    return _program(framework, problem, None, lines, needs_gradients=True, needs_gout=bool(gradient))


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


def _derived(framework: str, problem: Problem, subject: Subject, options: Mapping[str, Any], *, twice: bool) -> str:
    wanted = list(problem.wanted)
    call = _call(problem, subject, options)
    conjugate = framework == "torch" and any(d.startswith("complex") for d in problem.dtypes)
    lines = [f"wanted = {wanted}"]
    if twice:
        vectors = vectors_of(problem)
        lines.append(f"vectors = {{{', '.join(f'{n}: {_code(vectors[n])}' for n in wanted)}}}")
        lines.append(f"vs = [{', '.join(_converted(framework, f'vectors[{n}]', problem.dtypes[n]) for n in wanted)}]")
    if framework == "torch":
        lines += [
            f"result = {call}",
            "given = torch.from_numpy(gout).to(result.dtype)",
            "leaves = [xs[number] for number in wanted]",
            f"found = torch.autograd.grad(result, leaves, given{', create_graph=True' if twice else ''})",
        ]
        if twice:
            lines.append("found = torch.autograd.grad(found, leaves, vs, materialize_grads=True)")
    else:
        chosen = ", ".join(f"x{number}" for number in wanted)
        full = ", ".join(f"x{number}" if number in wanted else f"xs[{number}]" for number in range(len(problem.shapes)))
        lines += [
            f"f = lambda {chosen}: {call.replace('*xs', full)}",
            "given = jnp.asarray(gout).astype(jax.eval_shape(f, *[xs[n] for n in wanted]).dtype)",
            "first = lambda *chosen: jax.vjp(f, *chosen)[1](given)",
            "found = first(*[xs[n] for n in wanted])"
            if not twice
            else "found = jax.vjp(first, *[xs[n] for n in wanted])[1](tuple(vs))",
        ]
    lines.append("print('found', *found, sep='\\n')")
    if conjugate:
        lines.append("operands = [x.conj() for x in operands]  # as torch has it")
    if not twice:
        lines.append("expected = reference_gradients(spec, gout, *operands, **arguments, **indices)")
        lines.append("print('expected', *[expected[number] for number in wanted], sep='\\n')")
    else:
        if conjugate:
            lines.append("vectors = {number: v.conj() for number, v in vectors.items()}")
        lines += [
            "expected = {number: np.zeros(operands[number].shape) for number in wanted}",
            "for number, vector in vectors.items():",
            "    changed = [*operands[:number], vector, *operands[number + 1 :]]",
            "    parts = reference_gradients(spec, gout, *changed, **arguments, **indices)",
            "    expected = {n: x + parts[n] if n != number else x for n, x in expected.items()}",
            "print('expected', *expected.values(), sep='\\n')",
        ]
    return _program(framework, problem, subject, lines, needs_gradients=True, needs_gout=True)


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


def _program(
    framework: str,
    problem: Problem,
    subject: Subject | None,
    lines: list[str],
    *,
    needs_gradients: bool = False,
    needs_gout: bool = False,
) -> str:
    """Return a program: imports, spec, operands and index arrays, then the given lines."""
    text = "\n".join(lines)
    operands = problem.operands()
    large = sum(x.size for x in operands) > _MOST_ELEMENTS
    used = ["Problem"] if large else []
    used += [name for name in ("reference", "reference_gradients", "run_step") if f"{name}(" in text]
    head = ["import numpy as np", *_IMPORTS[framework], "import planner"]
    if used:
        head.append(f"from planner.testing import {', '.join(used)}")
    if subject is not None and subject.implementation is not None:
        head.append(_import_of(subject.implementation))
    if "optimize=optimize" in text:
        head.append("optimize = ...  # yours")
    if framework == "jax" and any(d in _WIDE for d in problem.dtypes):
        head.append("jax.config.update('jax_enable_x64', True)")
    arguments = {"sizes": problem.sizes, "index_mode": problem.index_mode}
    converted = [_converted(framework, f"operands[{n}]", d) for n, d in enumerate(problem.dtypes)]
    if framework == "torch" and needs_gradients:
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
    if needs_gout:
        body.append(f"gout = {_code(problem.output_gradient())}")
    return "\n".join([*head, "", *body, "", *lines, ""])


def _import_of(implementation: Callable[..., Any]) -> str:
    """Return the code that imports a function, or a placeholder if its module does not have it by name."""
    module, name = getattr(implementation, "__module__", None), getattr(implementation, "__qualname__", "")
    if module not in (None, "__main__") and getattr(sys.modules.get(module or ""), name, None) is implementation:
        return f"from {module} import {name} as implementation"
    return "implementation = ...  # yours"
