"""`make packages`, the models in torch: trained for a step as they are and within `planner.patch()`.

Each row of the table is a small model of a package from the package index. Outputs and the gradients of all parameters
and inputs are compared in value and dtype, and the bytes that autograd saves. `--times` also times warm steps, and
writes docs/benchmarks/packages.md. Row names select rows: ``python tests/peers/packages.py x-transformers e3nn``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT)]
TABLE = ROOT / "docs" / "benchmarks" / "packages.md"
# Both sides round, each in its own order of sums: errors are of the largest number of a tensor.
CLOSE = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 4e-2, "float16": 4e-3}


@dataclasses.dataclass(frozen=True)
class Row:
    """A model of a package.

    Attributes:
        package: the name in the package index.
        what: the model, in a few words.
        make: returns the model and its arguments.
    """

    package: str
    what: str
    make: Callable[[], tuple[Any, tuple[Any, ...]]]


def _torch() -> Any:
    import torch

    return torch


def tokens(*shape: int) -> Any:
    """Return random tokens of a vocabulary of 256."""
    return _torch().randint(0, 256, shape)


def real(*shape: int) -> Any:
    """Return random numbers that need a gradient."""
    return _torch().randn(shape).requires_grad_()


def x_transformers() -> Any:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=128, depth=2, heads=4, rotary_pos_emb=True, attn_pre_talking_heads=True)
    return TransformerWrapper(num_tokens=256, max_seq_len=256, attn_layers=layers), (tokens(2, 128),)


def vit_cct() -> Any:
    from vit_pytorch.cct import CCT

    return CCT(
        img_size=32, embedding_dim=96, n_conv_layers=1, kernel_size=3, stride=2, padding=1, pooling_kernel_size=3,
        pooling_stride=2, pooling_padding=1, num_layers=2, num_heads=4, mlp_ratio=2.0, num_classes=10,
        positional_embedding="learnable", dropout_rate=0.0, attention_dropout=0.0, stochastic_depth_rate=0.0,
    ), (real(2, 3, 32, 32),)  # fmt: skip


def vit_max() -> Any:
    from vit_pytorch.max_vit import MaxViT

    return MaxViT(
        num_classes=10, dim_conv_stem=32, dim=32, dim_head=16, depth=(1, 1), window_size=4, mbconv_expansion_rate=2
    ), (real(1, 3, 64, 64),)


def vit_xcit() -> Any:
    from vit_pytorch.xcit import XCiT

    return XCiT(
        image_size=32, patch_size=8, num_classes=10, dim=96, depth=2, cls_depth=1, heads=4, mlp_dim=192
    ), (real(2, 3, 32, 32),)  # fmt: skip


def timm(name: str, size: int, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import timm

        return timm.create_model(name, num_classes=10, **options), (real(1, 3, size, size),)

    return make


def linear_attention() -> Any:
    from linear_attention_transformer import LinearAttentionTransformerLM

    return LinearAttentionTransformerLM(
        num_tokens=256, dim=128, heads=4, depth=2, max_seq_len=256, causal=True, n_local_attn_heads=2,
        local_attn_window_size=64,
    ), (tokens(2, 256),)  # fmt: skip


def performer() -> Any:
    from performer_pytorch import PerformerLM

    return PerformerLM(
        num_tokens=256, max_seq_len=256, dim=128, depth=2, heads=4, dim_head=32, causal=False
    ), (tokens(2, 256),)  # fmt: skip


def perceiver() -> Any:
    from perceiver_pytorch import Perceiver

    return Perceiver(
        num_freq_bands=4, depth=2, max_freq=10.0, input_channels=3, num_latents=32, latent_dim=64, cross_dim_head=32,
        latent_dim_head=32, latent_heads=2, num_classes=10,
    ), (real(1, 16, 16, 3),)  # fmt: skip


def axial() -> Any:
    from axial_attention import AxialAttention

    return AxialAttention(dim=64, dim_index=1, heads=4, num_dimensions=2), (real(2, 64, 16, 16),)


def memory_efficient() -> Any:
    from memory_efficient_attention_pytorch import Attention

    return Attention(
        dim=128, dim_head=32, heads=4, causal=True, memory_efficient=True, q_bucket_size=64, k_bucket_size=64
    ), (real(2, 192, 128),)


def local_attention() -> Any:
    from local_attention import LocalTransformer

    return LocalTransformer(
        num_tokens=256, dim=128, depth=2, max_seq_len=256, causal=True, local_attn_window_size=64, dim_head=32, heads=4
    ), (tokens(2, 256),)


def experts() -> Any:
    from mixture_of_experts import MoE

    return MoE(dim=64, num_experts=8, hidden_dim=128), (real(2, 128, 64),)


def e3nn() -> Any:
    import e3nn
    import torch
    from e3nn.nn.models.v2106.gate_points_networks import SimpleNetwork

    # TorchScript holds operators of its own, which no mode sees.
    e3nn.set_optimization_defaults(jit_script_fx=False, jit_mode="eager")
    model = SimpleNetwork(
        irreps_in="4x0e", irreps_out="1x1o", max_radius=2.0, num_neighbors=4.0, num_nodes=5.0, mul=8, layers=2, lmax=2
    )
    data = {
        "pos": torch.randn(24, 3),
        "x": real(24, 4),
        "batch": torch.arange(24) // 12,
        "edge_index": torch.randint(0, 24, (2, 96)),
    }
    return model, (data,)


def e3nn_linear() -> Any:
    import e3nn
    from e3nn import o3

    e3nn.set_optimization_defaults(jit_script_fx=False, jit_mode="eager")
    product = o3.FullyConnectedTensorProduct("16x0e+8x1o+4x2e", "1x0e+1x1o+1x2e", "16x0e+8x1o+4x2e")
    return product, (real(64, 16 + 24 + 20), real(64, 9))


def tensor_layers() -> Any:
    import torch
    from tltorch import FactorizedLinear

    layers = [
        FactorizedLinear((4, 8), (8, 4), bias=True, factorization=kind, rank=0.5, implementation="factorized")
        for kind in ("cp", "tucker", "blocktt")
    ]
    for layer in layers:
        layer.weight.normal_(0, 0.1)
    return torch.nn.Sequential(*layers), (real(64, 32),)


def egnn() -> Any:
    from egnn_pytorch import EGNN_Network

    return EGNN_Network(num_tokens=256, dim=32, depth=2, num_nearest_neighbors=4), (tokens(1, 24), real(1, 24, 3))


def se3() -> Any:
    import torch
    from se3_transformer_pytorch import SE3Transformer

    return SE3Transformer(
        dim=16, heads=2, depth=1, dim_head=8, num_degrees=2, num_neighbors=4, valid_radius=10
    ), (real(1, 12, 16), real(1, 12, 3), torch.ones(1, 12, dtype=torch.bool))  # fmt: skip


def equiformer() -> Any:
    import torch
    from equiformer_pytorch import Equiformer

    return Equiformer(
        num_tokens=256, dim=(8, 4), dim_head=(4, 4), heads=(2, 2), num_degrees=2, depth=1, num_neighbors=4,
        attend_self=True, reduce_dim_out=True, l2_dist_attention=False,
    ), (tokens(1, 12), torch.randn(1, 12, 3), torch.ones(1, 12, dtype=torch.bool))  # fmt: skip


def nystrom() -> Any:
    from nystrom_attention import Nystromformer

    return Nystromformer(dim=128, dim_head=32, heads=4, depth=2, num_landmarks=32), (real(2, 128, 128),)


def routing() -> Any:
    from routing_transformer import RoutingTransformerLM

    return RoutingTransformerLM(
        num_tokens=256, dim=128, heads=4, depth=2, max_seq_len=256, window_size=64, causal=True
    ), (tokens(2, 256),)  # fmt: skip


def hierarchical() -> Any:
    from h_transformer_1d import HTransformer1D

    return HTransformer1D(
        num_tokens=256, dim=128, depth=2, causal=True, max_seq_len=256, heads=4, dim_head=32, block_size=32
    ), (tokens(2, 256),)  # fmt: skip


def lambdas() -> Any:
    from lambda_networks import LambdaLayer

    return LambdaLayer(dim=32, dim_out=32, r=7, dim_k=16, heads=4, dim_u=1), (real(2, 32, 16, 16),)


def bottleneck() -> Any:
    from bottleneck_transformer_pytorch import BottleStack

    return BottleStack(
        dim=64, fmap_size=16, dim_out=128, proj_factor=4, downsample=True, heads=4, dim_head=32, rel_pos_emb=True,
        num_layers=2,
    ), (real(2, 64, 16, 16),)  # fmt: skip


def halo() -> Any:
    from halonet_pytorch import HaloAttention

    return HaloAttention(dim=64, block_size=8, halo_size=4, dim_head=32, heads=4), (real(2, 64, 16, 16),)


def slots() -> Any:
    from slot_attention import SlotAttention

    return SlotAttention(num_slots=5, dim=64, iters=3), (real(2, 128, 64),)


def linformer() -> Any:
    from linformer import LinformerLM

    return LinformerLM(num_tokens=256, dim=128, seq_len=256, depth=2, heads=4, k=64), (tokens(2, 256),)


def key_memory() -> Any:
    from product_key_memory import PKM

    return PKM(dim=64, heads=4, num_keys=32, topk=8, dim_head=32), (real(2, 64, 64),)


def transformers(kind: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**options))
        return model, (tokens(2, 64),)

    return make


ROWS = (
    Row("x-transformers", "decoder, talking heads", x_transformers),
    Row("vit-pytorch", "compact convolutional transformer", vit_cct),
    Row("vit-pytorch", "MaxViT", vit_max),
    Row("vit-pytorch", "cross-covariance transformer", vit_xcit),
    Row("timm", "MViTv2 tiny", timm("mvitv2_tiny", 64, img_size=64)),
    Row("timm", "SAM image encoder", timm("samvit_base_patch16", 64, img_size=64, embed_dim=96, depth=2, num_heads=4)),
    Row("transformers", "XLNet", transformers("XLNet", vocab_size=256, d_model=128, n_layer=2, n_head=4, d_inner=256)),
    Row("transformers", "Funnel", transformers("Funnel", vocab_size=256, d_model=128, block_sizes=[1, 1], n_head=4,
                                               d_head=32, d_inner=256, num_decoder_layers=1)),
    Row("transformers", "Mamba 2", transformers("Mamba2", vocab_size=256, hidden_size=128, num_hidden_layers=1,
                                                state_size=16, num_heads=8, head_dim=32, n_groups=1, chunk_size=32)),
    Row("linear-attention-transformer", "language model", linear_attention),
    Row("performer-pytorch", "language model", performer),
    Row("perceiver-pytorch", "image classifier", perceiver),
    Row("axial-attention", "one layer", axial),
    Row("memory-efficient-attention-pytorch", "one layer in buckets", memory_efficient),
    Row("local-attention", "language model", local_attention),
    Row("mixture-of-experts", "8 experts", experts),
    Row("e3nn", "message passing", e3nn),
    Row("e3nn", "tensor product", e3nn_linear),
    Row("tensorly-torch", "CP, Tucker and block-TT layers", tensor_layers),
    Row("egnn-pytorch", "E(n) network", egnn),
    Row("se3-transformer-pytorch", "SE(3) transformer", se3),
    Row("equiformer-pytorch", "Equiformer", equiformer),
    Row("nystrom-attention", "transformer", nystrom),
    Row("routing-transformer", "language model", routing),
    Row("h-transformer-1d", "language model", hierarchical),
    Row("lambda-networks", "lambda layer", lambdas),
    Row("bottleneck-transformer-pytorch", "two blocks", bottleneck),
    Row("halonet-pytorch", "one layer", halo),
    Row("slot-attention", "5 slots", slots),
    Row("linformer", "language model", linformer),
    Row("product-key-memory", "32 x 32 keys", key_memory),
)  # fmt: skip


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in what a model takes or returns, in order."""
    if isinstance(value, _torch().Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [tensor for entry in value for tensor in tensors_in(entry)] if isinstance(value, (list, tuple)) else []


@dataclasses.dataclass
class Result:
    """What a step of training gives: outputs, gradients by name, and the bytes that autograd saved."""

    outputs: list[Any]
    gradients: dict[str, Any]
    saved: int


def step(model: Any, arguments: tuple[Any, ...], context: Any) -> list[Any]:
    """Run a model forward and backward within a context, from the same random state."""
    torch = _torch()
    torch.manual_seed(0)
    with context():
        outputs = tensors_in(model(*arguments))
        real_ones = [x for x in outputs if x.is_floating_point() and x.requires_grad]
        sum((x.float() * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in real_ones).backward()
    return outputs


def measured(model: Any, arguments: tuple[Any, ...], context: Any) -> Result:
    """Run a step, and return all that it gives."""
    torch = _torch()
    named = {**dict(model.named_parameters()), **{f"input {n}": x for n, x in enumerate(tensors_in(arguments))}}
    for x in named.values():
        x.grad = None
    own = {x.untyped_storage().data_ptr() for x in (*named.values(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(x: Any) -> Any:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(x)  # alive, so that no other storage gets its address
        return x

    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = step(model, arguments, context)
    gradients = {name: x.grad.detach().clone() for name, x in named.items() if x.grad is not None}
    return Result([x.detach().clone() for x in outputs], gradients, sum(saved.values()))


def differences(ours: Result, theirs: Result, autocast: str | None = None) -> list[str]:
    """Return what differs beyond rounding, in words; `autocast` is the dtype that steps are rounded to."""
    faults = []
    if len(ours.outputs) != len(theirs.outputs) or ours.gradients.keys() != theirs.gradients.keys():
        return ["other outputs or other gradients"]
    outputs = [(f"output {n}", a, b) for n, (a, b) in enumerate(zip(ours.outputs, theirs.outputs, strict=True))]
    gradients = [(f"gradient of {name}", ours.gradients[name], b) for name, b in theirs.gradients.items()]
    largest = max((_largest(b) for _, _, b in gradients), default=0.0)
    for name, a, b in (*outputs, *gradients):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            faults.append(f"{name} is {a.dtype}{list(a.shape)}, theirs is {b.dtype}{list(b.shape)}")
            continue
        # A gradient that is small beside the others is a difference of larger numbers.
        scale = max(_largest(b), 1e-2 * largest if name.startswith("gradient") else 0.0)
        error = _largest(a.double() - b.double())
        close = max(CLOSE.get(dtype, 0.0) for dtype in (str(b.dtype).removeprefix("torch."), autocast or ""))
        if not error <= close * scale:
            faults.append(f"{name} differs by {error:.1e} of {scale:.1e}")
    return faults


def _largest(x: Any) -> float:
    return float(abs(x.double().numpy()).max(initial=0.0))


def timed(steps: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Return the median milliseconds of each warm step, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["theirs"]) < 5:
        for name, run in steps.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {f"{name} ms": 1e3 * statistics.median(values) for name, values in times.items()}


def judge(row: Row, autocast: str | None, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Compare a model with itself within `planner.patch()`; return the figures and the faults."""
    import planner

    run, step = torch_runs(row, autocast)
    theirs, again = run(), run()
    if unsteady := differences(again, theirs):
        return {}, [f"without us two runs differ: {unsteady[0]}"]
    faults = []
    for _ in range(2):  # a cold call and a warm one
        with planner.patch("torch") as report:
            ours = run()
        faults += differences(ours, theirs, autocast)
        if ours.saved > theirs.saved:
            faults.append(f"saves {ours.saved} bytes for {theirs.saved}")
    if not report.routed:
        faults.append("no call of einsum was routed")
    figures = {"routed": report.routed, "passed_on": dict(report.passed_on), "saved": ours.saved, "of": theirs.saved}
    if seconds:

        def within() -> Any:
            with planner.patch("torch"):
                step()

        figures.update(timed({"theirs": step, "ours": within}, seconds))
    return figures, faults


def torch_runs(row: Row, autocast: str | None) -> tuple[Callable[[], Result], Callable[[], Any]]:
    """Return what measures a step of a model, and what runs one."""
    torch = _torch()

    def context() -> Any:
        return torch.autocast("cpu", getattr(torch, autocast)) if autocast else contextlib.nullcontext()

    torch.manual_seed(1)
    model, arguments = row.make()
    step(model, arguments, context)  # some models set themselves up in their first call
    return lambda: measured(model, arguments, context), lambda: step(model, arguments, context)


def stand_in_for_torchvision() -> None:
    """Let torchvision load without its operators: the index has builds for CUDA only, and models need none of them."""
    for name in ("nms", "qnms"):
        _torch().library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


# The tests that packages ship and that call einsum.
OWN_TESTS = ("tensorly.tenalg", "tensorly.tests", "tltorch", "einops.tests.test_einsum", "einops.tests.test_layers",
             "einops.tests.test_examples", "einops.tests.test_other")  # fmt: skip


def run_own_tests() -> list[str]:
    """Run the tests that packages ship, as they are and within `planner.patch()`; return those that only fail there."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "patched", "-W", "ignore", "-rfE", "--tb=no", "--pyargs"]
    paths = [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"TENSORLY_BACKEND": "pytorch", "EINOPS_TEST_BACKENDS": "numpy,torch,jax"}
    failed = []
    for patched in ("", "1"):
        command = [sys.executable, "-m", "pytest", *options, *OWN_TESTS]
        done = subprocess.run(command, env={**environment, "PATCHED": patched}, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        failed.append({line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))})
        print("within planner.patch():" if patched else "as they are:", lines[-1] if lines else done.stderr[-500:])
        print(*(line for line in lines if line.startswith("PATCHED")), sep="\n")
    return sorted(failed[1] - failed[0])


def put_section(heading: str, text: str) -> None:
    """Write a section of the page, in the place of the one with that heading."""
    parts = re.split(r"(?m)^(?=## )", TABLE.read_text())
    found = next((n for n, part in enumerate(parts) if part.startswith(f"## {heading}\n")), len(parts))
    parts[found : found + 1] = [f"## {heading}\n\n{text}"]
    TABLE.write_text("\n\n".join(part.strip() for part in parts) + "\n")


def write(lines: list[tuple[Row, str, dict[str, Any], list[str]]]) -> None:
    """Write the table of all rows."""
    import numpy as np

    versions = f"torch {_torch().__version__}, numpy {np.__version__}"
    table = [
        f"| {row.package} {version} | {row.what} | {f['routed']} | {sum(f['passed_on'].values())} "
        f"| {f['saved'] / 1e6:.3g} / {f['of'] / 1e6:.3g} "
        f"| {f['ours ms']:.3g} / {f['theirs ms']:.3g} | {f['ours ms'] / f['theirs ms']:.2f} |"
        for row, version, f, faults in lines
        if f and not faults
    ]
    put_section("torch", HEAD.format(date=datetime.date.today().isoformat(), versions=versions) + "\n".join(table))


HEAD = """Small models of packages from the package index are trained for a step, as they are and within
`planner.patch()`. A row stands here if outputs, the gradients of all parameters and inputs, and their dtypes are equal
(float32, up to rounding), and if autograd keeps no more bytes than without us. The table is written by
`make packages PACKAGES="--times 3 --write"`.

The models are small: a warm step takes some milliseconds, on one thread. The time includes entering the patch at each
step, which takes 5 us.

Measured {date} on 2 shared cores, with {versions}.

| package | model | calls routed | passed on | MB kept, ours / theirs | ms a step, ours / theirs | ratio |
|---|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="packages, or words of what a model is; all by default")
    parser.add_argument("--autocast", help="a dtype, such as bfloat16")
    parser.add_argument(
        "--times", type=float, default=0.0, metavar="SECONDS", help="time warm steps of each row so long"
    )
    parser.add_argument("--tests", action="store_true", help="run the tests that packages ship, instead of models")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.tests:
        broken = run_own_tests()
        print(*(f"FAIL  {test}" for test in broken), sep="\n")
        return len(broken)
    if importlib.util.find_spec("torchvision"):
        stand_in_for_torchvision()
    _torch().set_num_threads(1)
    lines, failed = [], 0
    for row in ROWS:
        if given.rows and not any(word in (row.package, row.what) or word in row.what for word in given.rows):
            continue
        try:
            version = importlib.metadata.version(row.package)
        except importlib.metadata.PackageNotFoundError:
            print(f"SKIP  {row.package}: not installed; make packages installs it")
            continue
        try:
            figures, faults = judge(row, given.autocast, given.times)
        except Exception as error:  # a model that does not run shows beside those that do
            import traceback

            traceback.print_exc()
            figures, faults = {}, [f"{type(error).__name__}: {error}"[:300]]
        failed += bool(faults)
        print(f"{'FAIL' if faults else 'ok  '}  {row.package} {version}, {row.what}: {figures}", flush=True)
        for fault in faults:
            print(f"      {fault}")
        lines.append((row, version, figures, faults))
    if given.write:
        write(lines)
    return failed


if __name__ == "__main__":
    sys.exit(main())
