"""Trains two models with `planner.contract` and with torch's own operators, in each context that training code has.

    python -m planner.bench.training

Both versions of a model start from the same weights and see the same batches, whose sizes change at every step. The
table says how far their losses are apart, what autograd saves, the peak, and the time of a step. Under FSDP2 the
gathered weights count as saved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import planner
from planner.inspect.memory import torch_memory

RANKS = 4
WIDTH, HEADS, EXPERTS, HIDDEN = 64, 4, 8, 128


class Block(nn.Module):
    """A transformer block: attention and two linear layers. `einsum` is `planner.contract` or `torch.einsum`."""

    def __init__(self, einsum: Callable[..., Tensor]) -> None:
        super().__init__()
        self.einsum, each = einsum, WIDTH // HEADS
        self.query, self.key, self.value = (_weight(WIDTH, HEADS, each) for _ in range(3))
        self.merge, self.widen, self.narrow = (
            _weight(HEADS, each, WIDTH),
            _weight(WIDTH, HIDDEN),
            _weight(HIDDEN, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same."""
        each = F.layer_norm(x, x.shape[-1:])
        query, key, value = (self.einsum("bnd,dhe->bhne", each, w) for w in (self.query, self.key, self.value))
        scores = self.einsum("bhqe,bhke->bhqk", query, key) * query.shape[-1] ** -0.5
        mixed = self.einsum("bhqk,bhke->bhqe", scores.softmax(-1), value)
        x = x + self.einsum("bhqe,hed->bqd", mixed, self.merge)
        hidden = F.gelu(self.einsum("bnd,df->bnf", F.layer_norm(x, x.shape[-1:]), self.widen))
        return x + self.einsum("bnf,fd->bnd", hidden, self.narrow)


class Experts(nn.Module):
    """A mixture of experts, of which each row takes the best two. `einsum` chooses the version."""

    def __init__(self, einsum: Callable[..., Tensor]) -> None:
        super().__init__()
        self.planned = einsum is planner.contract
        self.gate, self.widen, self.narrow = (
            _weight(WIDTH, EXPERTS),
            _weight(EXPERTS, WIDTH, HIDDEN),
            _weight(EXPERTS, HIDDEN, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same."""
        rows = x.flatten(0, 1)
        gates, chosen = (rows @ self.gate).topk(2)
        gates = gates.softmax(-1).to(rows.dtype)
        if self.planned:
            hidden = F.gelu(planner.contract("nd, q[ns]df -> nsf", rows, self.widen, q=chosen))
            out = planner.contract("nsf, q[ns]fd, ns -> nd", hidden, self.narrow, gates, q=chosen)
        else:
            hidden = F.gelu(torch.einsum("nd,nsdf->nsf", rows, self.widen[chosen]))
            # As one einsum of three operands it would compile anew for every size.
            out = (torch.einsum("nsf,nsfd->nsd", hidden, self.narrow[chosen]) * gates[..., None]).sum(1)
        result: Tensor = x + out.reshape(x.shape)
        return result


MODELS: dict[str, type[Block] | type[Experts]] = {"transformer block": Block, "top-2 experts": Experts}
EINSUMS: dict[str, Callable[..., Tensor]] = {"planner": planner.contract, "torch": torch.einsum}
# From a model to the function that computes its output, in each context.
CONTEXTS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "eager": lambda model: model,
    "compiled": lambda model: torch.compile(model, dynamic=True, fullgraph=True),
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16)(model),
    "checkpoint": lambda model: partial(checkpoint, model, use_reentrant=False),
}


class Trained(NamedTuple):
    """What training one version gives: losses and seconds of each step, and the bytes of one step."""

    losses: list[float]
    seconds: list[float]
    saved_bytes: int
    peak_bytes: int

    @property
    def later_step(self) -> float:
        """The median seconds of a step in the second half of the training, when most sizes have been planned for."""
        return statistics.median(self.seconds[len(self.seconds) // 2 :])


def train(name: str, context: Callable[[nn.Module], Callable[[Tensor], Tensor]], steps: int) -> dict[str, Trained]:
    """Train both versions of a model in turn, on the same batches; return what each gives, by the keys of `EINSUMS`."""
    runs = {}
    for label, einsum in EINSUMS.items():
        torch.manual_seed(0)
        model = MODELS[name](einsum)
        runs[label] = (model, context(model), torch.optim.SGD(model.parameters(), 0.1))
    losses: dict[str, list[float]] = {label: [] for label in runs}
    seconds: dict[str, list[float]] = {label: [] for label in runs}
    for batch in _batches(steps):
        for label, (_, forward, optimizer) in runs.items():
            begun = time.perf_counter()
            optimizer.zero_grad()
            loss = _loss(forward, batch)
            torch.autograd.backward(loss)
            optimizer.step()
            losses[label].append(float(loss.detach()))
            seconds[label].append(time.perf_counter() - begun)
    batch, trained = torch.randn(8, 32, WIDTH), {}
    for label, (model, forward, optimizer) in runs.items():
        optimizer.zero_grad()
        saved = _saved_bytes(partial(_loss, forward, batch), [batch, *model.parameters()])
        optimizer.zero_grad()
        _, memory = torch_memory(partial(_forward_and_backward, forward, batch))
        trained[label] = Trained(losses[label], seconds[label], saved, memory.peak_bytes)
    return trained


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * WIDTH**-0.5)


def _batches(steps: int) -> Iterator[Tensor]:
    """Yield batches whose sizes change at every step, the same ones each time."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        batch, positions = 2 + step % 7, 17 + 3 * (step % 11)
        yield torch.randn(batch, positions, WIDTH, generator=generator)


def _loss(forward: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Return how far the output is from the batch shifted by one position."""
    return F.mse_loss(forward(batch).float()[:, :-1], batch[:, 1:])


def _forward_and_backward(forward: Callable[[Tensor], Tensor], batch: Tensor) -> None:
    torch.autograd.backward(_loss(forward, batch))


def _saved_bytes(call: Callable[[], Tensor], given: Sequence[Tensor]) -> int:
    """Return the bytes of the storages that autograd saves, without those that were given."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in given]
    known = {x.untyped_storage().data_ptr() for x in local}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = call()  # alive while the bytes are added up, so that no two storages have one address
    del loss
    return sum(found.values())


# -- several processes -----------------------------------------------------------------------------------


def _shard(model: nn.Module) -> Callable[[Tensor], Tensor]:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    return model


def _rank(rank: int, port: int, steps: int, file: str) -> None:
    """Train all models as one of the ranks, which share the parameters by FSDP2; rank 0 writes what it saw."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    try:
        trained = {name: train(name, _shard, steps) for name in MODELS}
        if rank == 0:
            Path(file).write_text(json.dumps(trained))
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def train_sharded(steps: int) -> dict[str, dict[str, Trained]]:
    """Train all models on several processes of this machine; return what rank 0 saw, by model."""
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trained.json"
        spawn(_rank, (port, steps, str(file)), RANKS)  # type: ignore[no-untyped-call]
        read = json.loads(file.read_text())
    return {name: {label: Trained(*fields) for label, fields in v.items()} for name, v in read.items()}


# -- the table -------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Train every model in every context, and print the table."""
    parser = argparse.ArgumentParser("python -m planner.bench.training", description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--contexts", nargs="+", choices=(*CONTEXTS, "FSDP2"), default=(*CONTEXTS, "FSDP2"))
    options = parser.parse_args(argv)
    print("In pairs: planner, torch.\n")
    print("| model | context | losses differ by at most | saved, kB | peak, kB | all steps, s | later step, ms |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for context in options.contexts:
        if context == "FSDP2":
            trained = train_sharded(options.steps)
        else:
            trained = {name: train(name, CONTEXTS[context], options.steps) for name in MODELS}
        for name, versions in trained.items():
            ours, peer = versions["planner"], versions["torch"]
            apart = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, peer.losses, strict=True))
            figures = [
                f"{ours.saved_bytes / 1e3:,.0f}, {peer.saved_bytes / 1e3:,.0f}",
                f"{ours.peak_bytes / 1e3:,.0f}, {peer.peak_bytes / 1e3:,.0f}",
                f"{sum(ours.seconds):.3g}, {sum(peer.seconds):.3g}",
                f"{1e3 * ours.later_step:.3g}, {1e3 * peer.later_step:.3g}",
            ]
            print(f"| {name} | {context} | {apart:.1e} | {' | '.join(figures)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
