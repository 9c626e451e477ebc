"""The laws of `planner.testing` on a card: random specs, whose results must equal the oracle's.

``python -m planner.bench.cards.random_specs torch --share 0/8 --seconds 60`` prints a line of JSON for each law that
breaks, with a script that shows it, and at last how many problems held for each law.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import UnsatisfiedAssumption

from planner.cost.device import H200
from planner.groups import synchronize
from planner.language.errors import IndexRangeError
from planner.testing.engines import Engine, JaxEngine, TorchEngine
from planner.testing.judgement import Broken, Subject
from planner.testing.laws import LAWS, Law, both
from planner.testing.problem import Problem
from planner.testing.strategies import problems

# Laws of memory measure the CPU's allocators; the paths and the strides are the planner's, whatever runs them.
_NAMES = ("every lowering", "gradients", "index modes", "second derivatives")
_DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64", "int32")


# With this card's prices the Triton kernels run small problems too.
CHEAP = dataclasses.replace(H200, flop_rate=float("inf"), launch_seconds=0.0, kernel_seconds=0.0, group_seconds=0.0)


def _cheap(engine: Engine, subject: Subject, problem: Problem) -> None:
    """The result and the gradients equal the oracle's in plans that prefer the kernels."""
    from planner.backends.torch.backend import TorchBackend

    with mock.patch.object(TorchBackend, "device", return_value=CHEAP):
        both(engine, subject, problem)


class CudaEngine(TorchEngine):
    """PyTorch on its GPU, where errors of bad indices arrive late."""

    place = "cuda"

    @contextlib.contextmanager
    def context(self, problem: Problem) -> Iterator[None]:
        """Leave no error behind: what is pending in the end is raised, unless another error ends the context."""
        try:
            with super().context(problem):
                yield
        except BaseException:
            with contextlib.suppress(IndexRangeError):
                self.wait()
            raise
        self.wait()

    def wait(self) -> None:
        """Wait for the card, and raise what it tells."""
        synchronize()


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a share of the problems for some seconds; return 1 if a law breaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=("torch", "jax"))
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--smoke", action="store_true", help="on a CPU")
    options = parser.parse_args(arguments)
    share, _ = map(int, options.share.split("/"))
    engine: Engine = JaxEngine() if options.framework == "jax" else TorchEngine() if options.smoke else CudaEngine()
    laws = [law for law in LAWS if law.name in _NAMES]
    if options.framework == "torch" and not options.smoke:
        laws += [Law("Triton, where it can", _cheap, {"max_size": 5}, derives=True)] * 3
    ends, held, broken, turn = time.monotonic() + options.seconds, collections.Counter[str](), 0, 0
    while time.monotonic() < ends:
        law, dtype = laws[turn % len(laws)], _DTYPES[(turn // len(laws) + share) % len(_DTYPES)]
        for line in _broken(engine, law, dtype, 1000 * turn + share, ends):
            held[law.name] += line is None
            if line is not None:
                broken += 1
                print(json.dumps(line), flush=True)
        turn += 1
    print(json.dumps({"held": dict(held), "broken": broken}), flush=True)
    return int(broken > 0)


def _broken(engine: Engine, law: Law, dtype: str, number: int, ends: float) -> list[dict[str, Any] | None]:
    """Check a law on a few problems; return for each what broke, None if it held."""
    found: list[dict[str, Any] | None] = []
    small = {"max_axes": 4, "max_size": 2, "max_value": 1, "max_operands": 3} if "float16" in dtype else {}
    drawn = {"index_modes": ("raise", "drop", "clip"), **law.draws, "dtypes": (dtype,), **small}

    @seed(number)
    @settings(
        max_examples=4,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(problems(**drawn))
    def hold(problem: Problem) -> None:
        if time.monotonic() > ends:
            return
        try:
            law.holds(engine, Subject(), problem)
            found.append(None)
        except UnsatisfiedAssumption:
            pass
        except Exception as error:  # the next problem follows
            about = {"law": law.name, "problem": repr(problem)[:1000], "error": _said(error)}
            found.append(about | ({"script": error.args[-1][-3000:]} if isinstance(error, Broken) else {}))

    hold()
    return found


def _said(error: Exception) -> str:
    said = error.args[1:-1] if isinstance(error, Broken) else error
    return f"{type(error).__name__}: {said}"[:2000]


if __name__ == "__main__":
    sys.exit(main())
