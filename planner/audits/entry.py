"""`audit`: what the products of a program cost, and what planner would take."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, overload

from planner.language.errors import PlannerTypeError
from planner.program.frameworks import load_backend

if TYPE_CHECKING:
    from planner.audits.report import Audit


@overload
def audit(*, measure: bool = ...) -> AbstractContextManager[Audit]: ...
@overload
def audit(function: Callable[..., Any], *args: Any, measure: bool = ..., **kwargs: Any) -> Audit: ...
def audit(function: Callable[..., Any] | None = None, *args: Any, measure: bool = False, **kwargs: Any) -> Any:
    """Report what the einsums and gathered products of a program cost, and what to write instead.

    In torch it is a context. It sees every call of `torch.einsum`, and every matmul, elementwise product (with the sum
    after it) and `index_add` of rows that an index array reads, such as ``torch.bmm(x, w[q])``, in this thread and
    whatever name they are called by. In JAX it takes a function and its arguments, and reads the jaxpr.

    Example:
        >>> import torch
        >>> import planner
        >>> x, w = torch.ones(4096, 1, 64), torch.ones(32, 64, 64, requires_grad=True)
        >>> q = torch.arange(4096) % 32
        >>> with planner.audit() as report:
        ...     y = torch.bmm(x, w[q])
        >>> report[0].function, report[0].wasteful
        ('matmul', True)
        >>> print(report[0].code)
        planner.contract("ijk, q[i]kl -> ijl", x, w, q=q)

    Args:
        function: a function of JAX arrays; None for a context around a torch program.
        *args: arguments of the function: arrays, or trees of arrays.
        measure: whether to run each call again, as the program made it, and the line to write instead, on arrays of the
            same shapes and strides, and to measure time, peak and retained bytes. Else these are predicted, those of
            today as the naive plan's.
        **kwargs: keyword arguments of the function.

    Returns:
        The report: a site for each line and contraction, the most expensive first. A context yields it, and fills it
        when the `with` ends. Print it, iterate over it, or write a page with `to_html`. Costs are those of a call with
        its gradients, where operands need some.

    Raises:
        PlannerTypeError: the function cannot be called, or is one of torch.
    """
    if function is None:
        if args or kwargs:
            raise PlannerTypeError("audit takes arguments for a function only: audit(function, *args)")
        return _audit_torch(measure)
    if not callable(function):
        raise PlannerTypeError(f"audit takes a function of JAX arrays, not a {type(function).__name__}")
    given, torch = (function, *args, *kwargs.values()), sys.modules.get("torch")
    if torch is not None and any(isinstance(each, (torch.Tensor, torch.nn.Module)) for each in given):
        raise PlannerTypeError(
            "audit takes a function of JAX arrays; in torch, run the program within `with planner.audit() as report:`"
        )
    from planner.audits.findings import find_sites
    from planner.audits.jaxpr import read_jaxpr
    from planner.audits.report import Audit
    from planner.audits.sites import Record

    record = Record()
    read_jaxpr(function, args, kwargs, record)
    return Audit(*find_sites(record, "jax", measure))


@contextlib.contextmanager
def _audit_torch(measure: bool) -> Iterator[Audit]:
    from planner.audits.findings import find_sites
    from planner.audits.report import Audit
    from planner.audits.sites import Record
    from planner.audits.torch_calls import TorchWatch

    record, report = Record(), Audit()
    try:
        with load_backend("torch").routing(TorchWatch(record, measure), every=True):
            yield report
    finally:  # a program may end in an exception, such as SystemExit
        report.sites, report.unread = find_sites(record, "torch", measure)
