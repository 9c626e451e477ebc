"""What `test_host.py` runs as a script: the host's side of CUDA calls, without a card.

Triton has a driver of ours, which records launches and starts nothing, and kernels are not compiled. Tensors lie on the
CPU and say that they are on a card: `is_cuda`, and `get_device`, which gives the device that is current when they are
asked. The test passes the names of functions below, and reads what each returns as JSON.
"""

import dataclasses
import json
import sys
import time
import types
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import planner
from planner.backends.torch import checks
from planner.backends.torch.backend import TorchBackend
from planner.cost.device import H200
from planner.kernels.grouped_matmul import triton_grouped
from planner.kernels.grouping import triton_grouping
from planner.workloads import WORKLOADS

SEED = "nij, q[n]jk -> nik"
# So that small calls run the kernels too: launches are free, and so is the padding of tiles.
CHEAP = dataclasses.replace(H200, flop_rate=float("inf"), launch_seconds=0.0, kernel_seconds=0.0, group_seconds=0.0)


class Driver:
    """Devices and streams are numbers. A launch is recorded as (kernel, device, stream)."""

    def __init__(self):
        self.device, self.streams, self.launches, self.bad, self.compiled = 0, {}, [], None, 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return self.device

    def set_current_device(self, device):
        self.device = device

    def get_current_stream(self, device):
        return self.streams.get(device, 0)

    def compile(self, function, *arguments, **_):
        """A compiled kernel that records its launches; one that checks indices finds the bad one that a test sets."""
        self.compiled += 1

        def run(x, y, z, stream, handle, metadata, launch_metadata, enter, leave, *arguments):
            self.launches.append((function.__name__, self.device, stream))
            self.given = arguments
            if self.bad is not None and "word" in function.arg_names:
                given = dict(zip(function.arg_names, arguments, strict=False))
                if given["word"] is not None:
                    given["word"][0] = (given["ticket"] << 40) + self.bad + 1
                    given["poison"].fill_(torch.nan)
                    self.bad = None

        return types.SimpleNamespace(run=run, function=0, packed_metadata=(), launch_metadata=lambda *_: None)


CARD = Driver()


def start(kernel, *arguments, grid, warmup, **constants):
    """Stands for `JITFunction.run`."""
    compiled = CARD.compile(kernel, *arguments)
    values = [constants[name] for name in kernel.arg_names[len(arguments) :]]
    compiled.run(*grid, 1, 1, CARD.get_current_stream(CARD.device), 0, (), None, None, None, *arguments, *values)
    return compiled


# Operators of torch that start no kernel.
FREE = {
    "empty", "new_empty", "view", "as_strided", "detach", "expand", "permute", "transpose", "alias", "slice", "select",
    "unbind", "t", "unsqueeze", "squeeze", "reshape", "empty_like", "empty_strided", "resolve_neg", "contiguous",
    "lift_fresh", "_reshape_alias", "result_type", "resolve_conj",
}  # fmt: skip
# What waits for the device, because Python or a shape depends on values.
WAITS = {"item", "_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "is_nonzero"}


def operator_of(event):
    """The operator of torch that a profiler's event is of, or ""."""
    return event.name.removeprefix("aten::") if event.name.startswith("aten::") else ""


def launches_of(run):
    """The kernels that a call starts, Triton's by name and then torch's operators. Nothing may wait for the device."""
    before = len(CARD.launches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    names = []
    for event in profile.events():
        inner = operator_of(event)
        assert inner not in WAITS, inner
        # An operator that copies at times, such as `contiguous`, shows by what it calls then.
        outer = event.cpu_parent
        while outer is not None and operator_of(outer) in ("", *FREE):
            outer = outer.cpu_parent
        if inner and inner not in FREE and outer is None:
            names.append(inner)
    return [name for name, *_ in CARD.launches[before:]] + names


def microseconds(run):
    """The least time of a call. Other processes can only add to it."""
    times = []
    for _ in range(1000):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def calls_of(run):
    """How many functions are called, of Python or of C."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    run()
    sys.setprofile(None)
    return count - 1  # the last line is one


def operands(rows=131_072, groups=2048, sides=64):
    a, c = torch.ones(rows, 1, sides), torch.ones(groups, sides, sides)
    return a, c, torch.randint(0, groups, (rows,))


def calls(a, c, q):
    """A call, the same call in training, and its backward pass."""
    leaves = [x.clone().requires_grad_() for x in (a, c)]
    result = planner.contract(SEED, *leaves, q=q)
    gradient = torch.ones(result.shape, dtype=result.dtype)
    return (
        lambda: planner.contract(SEED, a, c, q=q),
        lambda: planner.contract(SEED, *leaves, q=q),
        lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True),
    )


def seed_prepared():
    a, c, q = operands()
    prepared = planner.group(q, 2048)
    prepared.longest = int(q.bincount().max())  # no kernel ran here that could tell
    runs = calls(a, c, prepared)
    for run in runs:
        run()
    return {
        "launches": [launches_of(run) for run in runs],
        "calls": [calls_of(run) for run in runs],
        "microseconds": [microseconds(run) for run in runs],
    }


def convolution():
    """A convolution by offsets and both its gradients, with prepared index arrays."""
    x, w, indices = torch.ones(87_680, 64).requires_grad_(), torch.ones(27, 64, 64).requires_grad_(), {}
    for name, size, shape in (("x", 87_680, (4529, 128)), ("w", 27, (4529,)), ("o", 87_680, (4529, 128))):
        q = torch.randint(0, size, shape)
        indices[name] = planner.group(q, size)
        indices[name].longest = int(q.flatten().bincount().max())  # no kernel ran here that could tell
    plan = planner.plan("x[pi]c, w[p]cm -> o[pi]m", x, w, sizes={"o": 87_680}, device=H200, **indices)
    result = plan(x, w, **indices)
    gradient = torch.ones(result.shape, dtype=result.dtype)

    def backward():
        return torch.autograd.grad(result, (x, w), gradient, retain_graph=True)

    backward()  # makes tables
    return [str(plan).count("added up"), launches_of(lambda: plan(x, w, **indices)), launches_of(backward)]


def experts():
    """A layer in which each row takes two experts, with prepared index arrays: a call, and its gradients."""
    workload, found = WORKLOADS["experts"], {}
    (q,) = workload.indices("torch").values()
    prepared = planner.group(q, 64)
    prepared.longest = int(q.flatten().bincount().max())  # no kernel ran here that could tell
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [torch.ones(shape, dtype=dtype, requires_grad=True) for shape in workload.shapes]
        operands, gradient = [x.detach() for x in leaves], torch.ones(workload.output_shape, dtype=dtype)
        forward, training = (planner.plan(workload.spec, *xs, e=prepared, device=H200) for xs in (operands, leaves))
        result = training(*leaves, e=prepared)
        runs = (
            lambda plan=forward, xs=operands: plan(*xs, e=prepared),
            lambda y=result, xs=leaves, g=gradient: torch.autograd.grad(y, xs, g, retain_graph=True),
        )
        for run in runs:  # makes tables
            run()
        found[str(dtype).removeprefix("torch.")] = [launches_of(run) for run in runs]
    return found


def dropping():
    """Calls that drop rows, and their backward passes. The index arrays are prepared."""
    found, q = {}, torch.arange(4096) % 65
    prepared = planner.group(q, 64, index_mode="drop")
    prepared.longest = 64  # no kernel ran here that could tell
    for spec, *shapes in ((SEED, (4096, 1, 64), (64, 64, 64)), ("q[n]d -> nd", (64, 64))):
        leaves = [torch.ones(shape, requires_grad=True) for shape in shapes]
        plan = planner.plan(spec, *leaves, q=prepared, index_mode="drop", device=H200)
        result = plan(*leaves, q=prepared)
        gradient = torch.ones(result.shape)
        runs = (
            lambda plan=plan, xs=leaves: plan(*xs, q=prepared),
            lambda y=result, xs=leaves, g=gradient: torch.autograd.grad(y, xs, g, retain_graph=True),
        )
        for run in runs:  # makes tables
            run()
        found[spec] = [launches_of(run) for run in runs]
    return found


def seed_sorted():
    a, c, q = operands(512, 8, 16)
    found = {}
    for name, index in {"sorted": q.sort().values, "not": q}.items():
        prepared = planner.group(index, 8)
        found[name] = [prepared.groups.order is None, launches_of(lambda p=prepared: planner.contract(SEED, a, c, q=p))]
    return found


def replayed():
    """Whether a call that is replayed reads its own operands, after one whose operands were one tensor.

    And whether a call with operands of the same shapes in other strides is another one.
    """
    x, y, q = torch.ones(4, 16, 16), torch.ones(4, 16, 16), planner.group(torch.arange(4), 4)
    plan = planner.plan(SEED, x, y, q=q, device=CHEAP)
    found = []
    for a, c in ((x, x), (x, y), (y, x), (x, y.clone())):
        result = plan(a, c, q=q)
        read = [given.data_ptr() for given in CARD.given if isinstance(given, torch.Tensor)][:3]
        found.append(read == [z.data_ptr() for z in (a, c, result)])
    facts = []
    for c in (y, y.mT):
        triton_grouped.grouped_matmul(x, c, q.groups)
        facts.append([given for given in CARD.given if not isinstance(given, torch.Tensor)])
    return [*found, facts[0] != facts[1]]


def aligned():
    """How many kernels calls compile: on arrays that begin at a multiple of 16 bytes or not, each of them twice.

    First those of a call that is replayed, then of one that is not.
    """
    memory, q = torch.ones(4 * 16 + 1), planner.group(torch.arange(4), 4)
    c, groups = torch.ones(4, 16, 16), q.groups
    index, check = torch.zeros(9, dtype=torch.int32), checks._Flag(torch.device("cpu"))
    check = triton_grouping.Check(check.word, check.poison, 0)
    runs = (
        lambda at: triton_grouped.grouped_matmul(memory[at : at + 64].view(4, 1, 16), c, groups),
        lambda at: triton_grouping.check_values(index[at : at + 8], 4, check),
    )
    found = []
    for run in runs:
        run(0)  # this records the launches; another call starts them from then on
        for at in (0, 1, 0, 1):
            before = CARD.compiled
            run(at)
            found.append(CARD.compiled - before)
    return found


def unprepared():
    found = {}
    a, c, q = operands(8192, 2048, 64)
    for dtype in (torch.float32, torch.bfloat16):
        forward, training, backward = calls(a.to(dtype), c.to(dtype), q)
        found[str(dtype).removeprefix("torch.")] = [launches_of(run) for run in (forward, training, backward)]
    return found


def takes():
    """A take, and the same in training with its backward pass, by a prepared index and by one that is not."""
    x, found = torch.ones(2048, 64), {}
    q = torch.randint(0, 2048, (131_072,))
    prepared = planner.group(q, 2048)
    prepared.longest = int(q.bincount().max())  # no kernel ran here that could tell
    for name, index in {"prepared": prepared, "not": q}.items():
        leaf = x.clone().requires_grad_()
        result = planner.contract("q[n]d -> nd", leaf, q=index)
        gradient = torch.ones(result.shape)
        runs = (
            lambda i=index: planner.contract("q[n]d -> nd", x, q=i),
            lambda r=result, a=leaf, g=gradient: torch.autograd.grad(r, a, g, retain_graph=True),
        )
        for run in runs:
            run()
        found[name] = [launches_of(run) for run in runs]
        found[f"{name}, calls"] = calls_of(runs[0])
        found[f"{name}, microseconds"] = microseconds(runs[0])
    return found


def places():
    """Calls on tensors of device 1 while device 0 is current, on two streams; and the flags that they use."""
    a, c, q = operands(64, 4, 16)
    plan = planner.plan(SEED, a, c, q=q, device=CHEAP)
    found = []
    with mock.patch.object(torch.Tensor, "get_device", return_value=1):
        for stream in (5, 5, 6):
            CARD.streams[1], before = stream, len(CARD.launches)
            plan(a, c, q=q)
            found.append(sorted({(device, stream) for _, device, stream in CARD.launches[before:]}))
    return {"launches": found, "current": CARD.device, "flags": sorted(place for place in checks._flags if place[0])}


def told():
    """Where the error of a bad index is raised, and what it says."""
    a, c, q = operands(64, 4, 16)
    q[7] = 4
    plan = planner.plan(SEED, *(x.requires_grad_() for x in (a, c)), q=q, device=CHEAP)
    found = {}

    def bad():
        CARD.bad = 7
        return plan(a, c, q=q)

    def error_of(run):
        try:
            run()
        except planner.IndexRangeError as error:
            return str(error)
        return ""

    bad()
    found["next call"] = error_of(lambda: planner.contract("ij,jk->ik", a[:, 0], c[0])) or error_of(
        lambda: plan(a, c, q=q)
    )
    found["after it"] = error_of(lambda: plan(a, c, q=q))
    result = bad()
    found["backward"] = error_of(lambda: result.sum().backward())
    bad()
    found["synchronize"] = error_of(planner.synchronize)
    bad()
    found["group"] = error_of(lambda: planner.group(q, 5))
    bad()
    q[7] = 0
    found["changed"] = error_of(planner.synchronize)
    q[7] = 9
    planner.synchronize(every_call=True)
    found["every call"] = error_of(lambda: plan(a, c, q=q))
    planner.synchronize(every_call=False)
    whole = planner.plan(SEED, a.detach().long(), c.detach().long(), q=q, device=CHEAP)
    found["integers"] = error_of(lambda: whole(a.detach().long(), c.detach().long(), q=q))
    bad()  # is raised at the end of the program
    return found


if __name__ == "__main__":
    driver.set_active(CARD)
    with (
        mock.patch.object(JITFunction, "run", start),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda x: True), create=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(TorchBackend, "device", return_value=CHEAP),
        mock.patch.object(TorchBackend, "family_signature", return_value=None),
    ):
        print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
