"""The PyTorch backend: it describes and checks tensors, and makes functions of plans."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from planner.backends.common.indices import check_index_dtype
from planner.backends.torch.checks import raise_pending, synchronize
from planner.backends.torch.conjugates import conjugated_bytes
from planner.backends.torch.contexts.autocast import autocast_dtype, autocast_state
from planner.backends.torch.contexts.modes import (
    as_planned,
    autocasts,
    compiles,
    deterministic,
    differ,
    grad_enabled,
    hint,
    in_functorch,
    is_symbol,
    only_grads,
    scripts,
    transform,
    transformed,
    unscripted,
    unwatched,
)
from planner.backends.torch.contexts.routing import EINSUM, RoutingMode
from planner.backends.torch.contexts.sharded import divided, is_distributed
from planner.backends.torch.eager import AUTOGRAD, call_seconds, kept_copies
from planner.backends.torch.executable import Executable
from planner.backends.torch.index import TorchIndex, torch_in_range
from planner.backends.torch.ops import OPS, captured, dataless, not_dense, promote, unseen
from planner.backends.torch.products.copied import with_kept_copies
from planner.backends.torch.products.einsum import einsum_copies, einsum_cost
from planner.backends.torch.rows import make_table
from planner.backends.torch.runner import family_runner, runner, symbol_runner
from planner.cost.device import CPU, GPU, Device, gpu_preset
from planner.cost.layout import layout_of
from planner.cost.rates import cpu_name, load_rates
from planner.kernels.tiled_product.triton_tiles import triton_version
from planner.language.errors import PlannerError, PlannerTypeError
from planner.language.spec import Gather, Operand, Spec
from planner.program.callbacks import callbacks
from planner.program.calls import Member, Run, RunPlan, SizeReader, Stepwise
from planner.program.contraction import Contraction
from planner.program.frameworks import Backend, KeptCopies, labelled
from planner.program.implementations import Table
from planner.program.plan import PlanRecord
from planner.program.program import Step
from planner.program.tree import Tree


def _kept_copies(
    table: Table,
    contraction: Contraction,
    tree: Tree,
    forward: Sequence[Step],
    backward: Sequence[Step],
    records: bool | None,
) -> KeptCopies:
    """Return what `Backend.kept_copies` does."""
    copies = kept_copies(contraction, tree, forward, backward, records)
    return None if copies is None else (copies, *with_kept_copies(forward, backward, table, contraction.device))


class TorchBackend(Backend):
    """Runs plans on torch tensors."""

    name = "torch"
    strided = True
    conjugated_bytes = staticmethod(conjugated_bytes)
    einsum_copies = staticmethod(einsum_copies)
    einsum_cost = staticmethod(einsum_cost)

    def __init__(self) -> None:
        self.table, self.ops = make_table(), OPS
        self.kept_copies = partial(_kept_copies, self.table)
        self.call_seconds, self.autograd_rows = call_seconds, AUTOGRAD

    def operand(self, array: Tensor) -> Operand:
        """Describe a tensor.

        Under `torch.func` every float may need a gradient at some level. `torch.jit.trace` checks what it recorded by
        tracing once more without gradients, so there too every float gets one.
        """
        if (reason := not_dense(array)) is not None:
            raise PlannerError(reason)
        needs = grad_enabled() and array.requires_grad
        if in_functorch() or scripts() is not None:
            needs = array.dtype.is_floating_point or array.dtype.is_complex
        strides = tuple(map(hint, array.stride()))
        return Operand(self.numbers(array.shape), str(array.dtype).removeprefix("torch."), strides, needs)

    def numbers(self, sizes: Any) -> Any:
        """Return a shape, or `sizes=` of a call, in numbers, without a guard of the compiler that traces it."""
        if not any(map(is_symbol, _given(sizes))):
            return sizes
        with unscripted():
            by_letter = isinstance(sizes, Mapping)
            return {name: hint(n) for name, n in sizes.items()} if by_letter else tuple(map(hint, sizes))

    def signature(self, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Any:
        """Return all that a plan depends on, in microseconds; None for calls that are overridden.

        Raises:
            AttributeError: something is not a tensor, or sizes are tensors, as under `torch.jit.trace`.
        """
        # Modes would see what is read below.
        if has_torch_function((*operands, *indices.values()) if indices else operands):
            return None
        if scripts() is not None:
            raise AttributeError("under torch.jit.trace sizes are tensors")
        flags: tuple[Any, ...] = (grad_enabled(), transform() is None or (only_grads(),), deterministic())
        if autocasts():
            flags += (autocast_state(operands[0].device.type),)
        try:
            if len(operands) == 2 and not indices:  # as below, without a loop, which takes 0.2 us longer
                x, y = operands
                return (*flags, x.shape, x.stride(), x.dtype, x.device, x.layout, x.requires_grad,
                        y.shape, y.stride(), y.dtype, y.device, y.layout, y.requires_grad)  # fmt: skip
            key: list[Any] = [*flags]
            for x in operands:
                key.append((x.shape, x.stride(), x.dtype, x.device, x.layout, x.requires_grad))
            for name, q in indices.items():
                key.append((name, type(q), q.shape, q.dtype, q.device))
        except RuntimeError:  # some layouts have no shape or strides
            _refuse(operands, indices)
            raise
        return tuple(key)

    def result_dtype(self, dtypes: Sequence[str], operands: Sequence[Any], spec: Spec, device: Device) -> str:
        """Promote dtypes as torch promotes tensors, and not Python numbers; under autocast as `torch.einsum`."""
        result = dtypes[0]
        for number, name in enumerate(dtypes[1:], 1):
            wider = promote(result, name)
            if wider is None:
                raise PlannerTypeError(
                    f"operand {number} is {name}, which torch does not promote with {result}: cast one of the operands"
                )
            result = wider
        kind = next((x.device.type for x in operands if isinstance(x, Tensor)), device.kind)
        return result if autocast_state(kind) is None else autocast_dtype(spec, dtypes, kind)

    def device(self, operands: Sequence[Any]) -> Device:
        """Return the rates of the machine that the operands are on."""
        first = next((x.device for x in operands if isinstance(x, Tensor)), None)
        if first is None or first.type == "cpu":
            return load_rates(CPU, "torch", str(torch.__version__), cpu_name(torch.get_num_threads()))
        if first.type != "cuda" or not torch.cuda.is_available():  # tensors without values may be on a card elsewhere
            return GPU
        return _card(first)

    def check_index(self, name: str, index: Any) -> None:
        """Refuse an index array that is not of integers, or is not dense."""
        if isinstance(index, Tensor) and (reason := not_dense(index)) is not None:
            raise PlannerError(f"index array {name!r} {reason}")
        check_index_dtype(name, str(index.dtype).removeprefix("torch."))

    def check_devices(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        """Refuse arrays on different devices: nothing is moved in silence."""
        arrays = (*operands, *indices.values())
        if len({x.device for x in arrays if hasattr(x, "device")}) < 2:
            return
        devices = [(label, x.device) for label, x in labelled(operands, indices) if hasattr(x, "device")]
        for label, device in devices[1:]:
            if device != devices[0][1]:
                raise PlannerError(f"{label} is on {device}, but {devices[0][0]} on {devices[0][1]}: move one of them")

    def group(self, q: Tensor, size: int, index_mode: str) -> TorchIndex:
        """Check and sort an index array."""
        raise_pending()
        if is_distributed(q):
            raise PlannerError("planner.group takes no DTensor: pass the DTensor itself as the index array")
        if dataless(q) or (unseen(q) and not captured(q)):
            raise PlannerError(
                "an index array that is fake, batched by vmap or on the meta device has no values to group: group it "
                "before, where it has values, and pass what planner.group returns; .to() moves that to another device"
            )
        values, may_drop = torch_in_range(q, Gather("q", (), size), index_mode)
        # It copies the values: if the caller changed them later, the sorted order would no longer fit.
        return TorchIndex.of(values.clone(), size, index_mode, may_drop)

    def synchronize(self, every_call: bool | None) -> None:
        """Wait for cards to check index arrays, and raise their errors."""
        synchronize(every_call)

    def in_range(self, q: Any, gather: Gather, index_mode: str) -> tuple[Tensor, bool]:
        """Bring an index array into range."""
        return torch_in_range(q, gather, index_mode)

    def divided(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Return what runs calls of DTensors; None for other calls."""
        return divided(operands, indices)

    def trial(
        self, plan: PlanRecord, operands: Sequence[Tensor], indices: Mapping[str, Any]
    ) -> Callable[[], None] | None:
        """Return a function that runs a plan with its gradients, discards them, and waits for the device."""
        values = [q for q in indices.values() if isinstance(q, Tensor)]
        if transformed() or any(map(dataless, (*operands, *values))):
            return None
        on_gpu = any(x.is_cuda for x in operands)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return None
        needs = [variable is not None for variable in plan.programs.gradients]
        leaves = [x.detach().requires_grad_(need) for x, need in zip(operands, needs, strict=True)]
        wanted = [x for x, need in zip(leaves, needs, strict=True) if need]
        run, ones = self.bind(plan), None

        def once() -> None:
            nonlocal ones
            result = run(leaves, indices)
            if wanted:
                ones = torch.ones_like(result) if ones is None else ones
                torch.autograd.grad(result, wanted, ones)
            if on_gpu:
                torch.cuda.synchronize(leaves[0].device)

        return once

    def routing(self, route: Callable[..., Any], every: bool = False) -> AbstractContextManager[object]:
        """Route every call of `torch.einsum`, or of all of torch's functions."""
        return RoutingMode(route) if every else EINSUM(route)

    def unwatched(self) -> AbstractContextManager[object]:
        """Hide what runs inside from modes and from hooks on saved tensors."""
        return unwatched()

    def to_numpy(self, array: Tensor, dtype: str) -> Any:
        """Return a view of the tensor's memory. NumPy has no bfloat16, so its values are their bits."""
        values = array.detach().resolve_conj().resolve_neg().to("cpu", getattr(torch, dtype))
        return (values.view(torch.int16) if dtype == "bfloat16" else values).numpy()

    def from_numpy(self, values: Any, dtype: str, device: str) -> Tensor:
        """Return a tensor over the same memory, or a copy of memory that cannot be written."""
        tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
        if dtype == "bfloat16" and tensor.dtype == torch.int16:
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(device, getattr(torch, dtype))

    def pins_tiles(self) -> bool:
        """Return whether torch is asked for deterministic algorithms: another tiling adds in another order."""
        return deterministic()

    def environment(self, operands: Sequence[Any]) -> dict[str, str]:
        """Name the version, the device, and the settings that decide how products run."""
        device = next((x.device for x in operands if isinstance(x, Tensor)), torch.device("cpu"))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        precision = torch.get_float32_matmul_precision()
        threads = str(torch.get_num_threads())
        settings = {"torch": torch.__version__, "device": name, "threads": threads, "precision": precision}
        return {**settings, "tiles": "pinned" if self.pins_tiles() else "free", "triton": triton_version()}

    def bind(self, plan: PlanRecord) -> RunPlan:
        """Return the function that runs a plan."""
        run = runner(plan, self.table)
        return run if plan.dtype not in _MOVED_ONLY else partial(_run_moves, run, plan.dtype)

    def bind_family(self, plan: PlanRecord) -> Callable[[Member], RunPlan] | None:
        """Return what makes the function that runs the plan of a member."""
        return None if plan.dtype in _MOVED_ONLY else family_runner(plan, self.table)

    def bind_symbols(
        self, plan: PlanRecord, operands: Sequence[Tensor], indices: Mapping[str, Any], sizes: Any
    ) -> tuple[PlanRecord, RunPlan, Mapping[str | Gather, Any]] | None:
        """Return the plan, the function that runs it at symbols for sizes, and these; None if all sizes are numbers.

        A plan with a limit runs at the sizes that it was made for, since the limit holds for these.
        """
        shapes = [x.shape for x in (*operands, *indices.values())]
        symbols = list(filter(is_symbol, (*itertools.chain(*shapes), *_given(sizes))))
        if not symbols:
            return None
        if plan.options.memory_limit is not None or plan.options.retain_limit:
            for n in symbols:
                if isinstance(n, torch.SymInt):
                    int(n)  # the compiler guards this size
            return None
        reader = SizeReader(plan.resolved.spec, plan, tuple(indices))
        entries = dict(reader.entries(sizes))
        member = reader.member(shapes, entries.items(), differ)
        assert member is not None
        told = {*entries, *dict(reader.assumed)}
        given = [member.sizes[e] if e in told else -1 for e in reader.output]
        run = symbol_runner(plan, self.table, member, given)
        return plan, run if plan.dtype not in _MOVED_ONLY else partial(_run_moves, run, plan.dtype), member.sizes

    def family_signature(
        self, operands: Sequence[Tensor], indices: Mapping[str, Any]
    ) -> tuple[Hashable, list[tuple[int, ...]]] | None:
        """Return layouts, dtypes and flags, and the shapes of operands and index arrays; None outside of plain calls.

        Plain calls have tensors with values, on a CPU, and are under no transform.
        """
        if in_functorch() or scripts() is not None:
            return None
        key: list[Any] = [grad_enabled(), deterministic(), autocasts() and autocast_state("cpu")]
        shapes: list[tuple[int, ...]] = []
        for x in operands:
            if type(x) not in _PLAIN or not x.is_cpu or x.layout is not _STRIDED:
                return None
            shape, layout = x.shape, None
            if not x.is_contiguous():
                layout = layout_of(shape, x.stride())
                if layout is not None and layout.repeated:
                    return None
            key += (layout, x.dtype, x.requires_grad)
            shapes.append(shape)
        for name, q in indices.items():
            kind = type(q)
            if (kind is not Tensor and kind is not TorchIndex) or q.device.type != "cpu":
                return None
            key += (name, kind, q.dtype)
            shapes.append(q.shape)
        return tuple(key), shapes

    def refuse_dataless(self, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> None:
        """Refuse meta tensors, fake tensors, and calls under a transform or a compiler."""
        if transformed() or compiles():
            raise PlannerError("arrays have no values inside a transform or a compiled function; call this outside")
        for label, given in labelled(operands, indices):
            x = given.values if isinstance(given, TorchIndex) else given
            if is_distributed(x):
                raise PlannerError(f"{label} is on several devices: pass a tensor on one device")
            if isinstance(x, Tensor) and dataless(x):
                raise PlannerError(f"{label} is a meta or fake tensor: it has no values; pass a real tensor")

    def stepwise(
        self,
        plan: PlanRecord,
        operands: Sequence[Tensor],
        indices: Mapping[str, Any],
        gradient: Tensor | None = None,
        kept: Mapping[int, Any] | None = None,
    ) -> Stepwise:
        """Return the forward program with its inputs, or the backward program."""
        executable = Executable(plan, self.table)
        with torch.no_grad(), as_planned():
            index = executable.prepare(indices)
            if gradient is None:
                values: dict[int, Any] = dict(enumerate(executable.views(operands)))
            else:
                values = executable.backward_values(gradient, operands, index, kept or {})

        def run(step: Run, inputs: Sequence[Tensor]) -> Any:
            with torch.no_grad(), as_planned():
                return step(inputs, index)

        def bind(step: Step, inputs: Sequence[Tensor]) -> partial[Any]:
            return partial(run, self.table.rows[step.choice.lowering].prepared(step.op), inputs)

        return Stepwise(values, bind, index.orders)


_PLAIN, _STRIDED = (Tensor, torch.nn.Parameter), torch.strided
# Dtypes that torch can move and multiply, but neither sum nor scatter.
_MOVED_ONLY = ("uint16", "uint32", "uint64")


def _given(sizes: Any) -> tuple[Any, ...]:
    """Return the entries of `sizes=`, which may be anything."""
    if isinstance(sizes, Mapping):
        return tuple(sizes.values())
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else ()


def _run_moves(run: Callable[..., Any], dtype: str, operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
    try:
        return run(operands, indices)
    except NotImplementedError:
        raise PlannerError(
            f"operand 0 and what is computed with it are {dtype}, for which torch has no sums: pass dtype='int64', "
            "or cast the operands"
        ) from None


def _card(device: torch.device) -> Device:
    """Return the rates of a graphics card, with its compute capability; AMD's cards have none, whatever torch says."""
    product, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    rates = load_rates(gpu_preset(product), "torch", str(torch.__version__), product)
    known = dataclasses.replace(rates, name=gpu_preset(product).name)  # which products are in float64 depends on it
    return dataclasses.replace(known, capability=0 if torch.version.hip else 10 * capability[0] + capability[1])


def _refuse(operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
    """Raise an error that names the array that is not dense, if there is one."""
    for label, x in labelled(operands, indices):
        if isinstance(x, Tensor) and (reason := not_dense(x)) is not None:
            raise PlannerError(f"{label} {reason}") from None


backend = TorchBackend()
# So that `torch.load` accepts what it would not by itself: prepared index arrays and plans.
torch.serialization.add_safe_globals([callbacks().group, callbacks().load_plan])
