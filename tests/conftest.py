"""Hypothesis profiles and the little that every test file shares."""

import atexit
import gc
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version

import hypothesis
import pytest
from _pytest import python
from hypothesis.internal.conjecture import providers

# torch and JAX may share one device: JAX must not take most of its memory at the first call.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Several test processes share the cores: where torch takes all of them for each, threads wait for one another (three
# tests of its laws took 102 s with two threads, 53 s with one, beside other work).
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")

# XLA compiles in a hurry, here and in processes that tests start: without optimisation, and without the generator of
# fused loops. What is tested so is what programs mean. Tests whose subject is what XLA makes of them ask for options of
# their own, see `jax_fast`; the nightly run compiles all as users do. The tests of JAX's contexts took 50 s in place of
# 100, those of grouped and pooled kernels 64 in place of 90. Another version of XLA than the one in constraints.txt may
# not know a flag, and would end the process.
if PROFILE != "nightly" and importlib.util.find_spec("jaxlib") and version("jaxlib") == "0.10.2":
    in_a_hurry = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"
    )
    os.environ.setdefault("XLA_FLAGS", in_a_hurry)

# Triton's kernels are interpreted, on a machine with a card too: what runs there is `make gpu`. The variable is read
# when a kernel is defined.
os.environ.setdefault("TRITON_INTERPRET", "1")

# The searches make many small objects that live on, and each full collection looks at all of torch's and JAX's: with
# Python's own thresholds a tenth of the time of the laws went into collections.
gc.set_threshold(100_000, 50, 1_000)

# Plans must not depend on rates that someone measured on this machine; subprocesses inherit the empty folder.
os.environ["PLANNER_CACHE"] = tempfile.mkdtemp(prefix="planner-tests-")
# Nor on what tests before them searched; the fixture `disk` turns it on.
os.environ["PLANNER_DISK"] = "off"
atexit.register(shutil.rmtree, os.environ["PLANNER_CACHE"], ignore_errors=True)


def _share_folder(variable: str) -> None:
    """Name a new folder by an environment variable. The processes of pytest-xdist, and those of tests, inherit it."""
    if variable not in os.environ:
        os.environ[variable] = tempfile.mkdtemp(prefix="planner-tests-")
        atexit.register(shutil.rmtree, os.environ[variable], ignore_errors=True)


# torch's compiler shares a folder of compiled code between all programs of a user. Code for another kind of processor
# that lay there failed a test.
_share_folder("TORCHINDUCTOR_CACHE_DIR")
# Many tests make programs that XLA compiled for another test: those of JAX's contexts took 38 s in place of 55.
if PROFILE != "nightly":
    _share_folder("JAX_COMPILATION_CACHE_DIR")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Plans, compilations and first touches of memory make single examples slow: no deadline.
_COMMON = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
}
# `make test` and CI draw the same examples in every run and on every machine, and remember none: a test that fails does
# so because of the change that it is run on.
hypothesis.settings.register_profile("ci", max_examples=50, derandomize=True, database=None, **_COMMON)
# `make mutants` wants one failure, not the least one.
_FEW = {"max_examples": 30, "phases": (hypothesis.Phase.explicit, hypothesis.Phase.generate)}
hypothesis.settings.register_profile("mutants", hypothesis.settings.get_profile("ci"), **_FEW)
# Hypothesis mixes constants from the project's loaded modules into what it draws. Which are loaded depends on the tests
# that ran before in the same process, so `make test` draws without them.
if PROFILE != "nightly":
    providers._get_local_constants = lambda: providers._local_constants
# `make nightly` draws new examples in every run. A failure prints the blob that draws it again, and is then pinned by
# @example.
hypothesis.settings.register_profile("nightly", max_examples=1_000, derandomize=False, print_blob=True, **_COMMON)


def _call_with_room(item):
    return python.pytest_pyfunc_call(item)


# Python keeps frames in chunks of 16 kB, and gives a chunk back as soon as no frame is in it. A loop whose calls happen
# to cross the end of a chunk maps and unmaps memory in each turn: the laws of torch took 58 s in place of 37 (Python
# 3.11). A frame of a megabyte gets a chunk of two, and the frames of all that it calls lie in the rest of it.
_call_with_room.__code__ = _call_with_room.__code__.replace(co_stacksize=2**17)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test function as pytest does, with room for the frames of all that it calls."""
    return _call_with_room(pyfuncitem)


@pytest.fixture(autouse=True, scope="module")
def _nothing_old_is_collected():
    """A full collection in a test looks at what this file's tests made, not at all of torch, JAX and other tests.

    After some thousand tests it took 3 s, and many tests collect.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded():
    """Let tests that draw from torch's global generator see the same numbers, whichever tests ran before them."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A folder in which plans are remembered."""
    monkeypatch.setenv("PLANNER_DISK", "on")
    monkeypatch.setenv("PLANNER_CACHE", str(tmp_path))
    return tmp_path


hypothesis.settings.load_profile(PROFILE)


def examples(ci: int, nightly: int) -> int:
    """The number of examples for the profile in force: ``@settings(max_examples=examples(500, 10_000))``."""
    return {"ci": ci, "mutants": min(ci, 30), "nightly": nightly}[PROFILE]


class Clock:
    """A clock that stands still but for what sleeps or runs by it: what is said of times holds on a busy machine."""

    now = 0.0

    def __call__(self):
        """Say the time."""
        return self.now

    def sleep(self, seconds):
        """Let time pass."""
        self.now += seconds

    def run(self, seconds, log, name, error=None):
        """Be a program that takes a time, or fails; its name goes to the log."""
        log.append(name)
        if error is not None:
            raise error
        self.sleep(seconds)


GOLDEN = pathlib.Path(__file__).parent / "golden"


def assert_on_file(text: str, name: str) -> None:
    """Compare with a golden file. ``UPDATE_GOLDEN=1`` writes it anew: read the difference before it is committed."""
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text, encoding="utf-8")
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def installed_frameworks() -> tuple[str, ...]:
    """NumPy, and which of torch and JAX this machine has; nothing is imported."""
    return ("numpy", *(name for name in ("torch", "jax") if importlib.util.find_spec(name)))


def run(
    *command: object, given: str = "", cwd: str | os.PathLike | None = None, timeout: float = 1200, **environment: str
) -> str:
    """The output of a command, which sees this checkout, is given text to read, and must not fail."""
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [*map(str, command)], input=given, capture_output=True, text=True, check=False, timeout=timeout, cwd=cwd,
        env={**os.environ, "PYTHONPATH": root, **environment},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-20_000:]
    return done.stdout


def run_python(program: str, *arguments: object, **how) -> str:
    """The output of a program in a new process of Python."""
    return run(sys.executable, "-W", "ignore", "-", *arguments, given=program, **how)


@pytest.fixture(scope="session")
def torch():
    """The framework; a test that needs it is skipped without it."""
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="session")
def jax():
    """The framework; a test that needs it is skipped without it."""
    return pytest.importorskip("jax", reason="jax is not installed")


@pytest.fixture(scope="session")
def jnp(jax):
    """JAX's arrays."""
    return jax.numpy


@pytest.fixture
def jax_as_users(monkeypatch, xla_sizes):
    """Eager calls in JAX run steps compiled as users compile them."""
    import jax_fast

    monkeypatch.setattr("planner.backends.jax.step.compile_step", jax_fast.compiled_as_users)


@pytest.fixture
def jax_in_a_hurry(monkeypatch):
    """Eager calls in JAX run steps compiled without optimisation: the same values, sooner. Not in the nightly run."""
    if PROFILE != "nightly" and importlib.util.find_spec("jax"):
        import jax_fast

        monkeypatch.setattr("planner.backends.jax.step.compile_step", jax_fast.compiled)


@pytest.fixture
def xla_sizes(monkeypatch):
    """What XLA says of its programs' memory is what it says to users; their machine code is of no interest."""
    if PROFILE != "nightly" and importlib.util.find_spec("jax"):
        import jax_fast

        jax_fast.for_sizes_alone(monkeypatch)
