"""The rates that `python -m planner calibrate` measured: one small JSON file for each machine and framework version.

A file is ignored if it is damaged, has another version or belongs to another machine. Then a warning names the file,
and the preset is used. Files are replaced atomically, so a reader never sees half a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import platform
import re
import sys
import warnings
from typing import Any

from planner.cost.device import Device
from planner.cost.store import cache_folder, read_json, write_json

FORMAT, VERSION = "planner rates", 3
# `write` never writes nearly so much. A longer file is not read.
MOST_BYTES = 65536


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """The machine and framework that a measurement holds for.

    Attributes:
        machine: name of the processor or graphics card, with the number of processors that may be used.
        framework: "torch", "jax" or "numpy".
        framework_version: the framework's version.
        kind: the kind of device, as in `Device.kind`.
    """

    machine: str
    framework: str
    framework_version: str
    kind: str


def path_of(key: Key) -> pathlib.Path:
    """Return the file of a key. Its name shows the framework and the kind, then a digest of the whole key."""
    digest = hashlib.sha256(json.dumps(dataclasses.astuple(key)).encode()).hexdigest()[:16]
    words = re.sub(r"[^A-Za-z0-9.+]+", "-", f"{key.framework}-{key.framework_version}-{key.kind}")
    return cache_folder() / f"rates-{words:.80}-{digest}.json"


@functools.lru_cache(maxsize=8)
def cpu_name(threads: int | None = None) -> str:
    """Return the processor's name and the number of threads: by default as many as this process may use."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text(errors="replace")
        if match := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            name = match[1].strip()
    if threads is None:
        threads = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return f"{name}, {threads} thread{'s' * (threads != 1)}"


@functools.lru_cache(maxsize=64)
def load_rates(preset: Device, framework: str, framework_version: str, machine: str = "") -> Device:
    """Return the measured rates, or the preset if there are none. Each process reads a file once.

    Args:
        preset: the rates to use if nothing was measured.
        framework: "torch", "jax" or "numpy".
        framework_version: the framework's version.
        machine: name of a graphics card; by default the `cpu_name` of this machine's processor.
    """
    key = Key(machine or cpu_name(), framework, framework_version, preset.kind)
    rates = read(key)
    if rates is None:
        return preset
    return dataclasses.replace(rates, **{name: getattr(preset, name) for name in _NOT_MEASURED})


def read(key: Key) -> Device | None:
    """Return the rates measured for a key, or None. If there is a file that cannot be used, warn."""
    try:
        path = path_of(key)
    except OSError:
        return None
    try:
        return _device(read_json(path, MOST_BYTES), key)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        if not os.path.exists(path):  # nor is there one where the folder is a file, or its name too long
            return None
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"{path} holds no rates to use and is ignored ({reason:.200}): remove it, or run python -m planner "
            "calibrate",
            stacklevel=2,
        )
        return None


def _device(entry: Any, key: Key) -> Device:
    """Return the rates in a file's JSON, after checking whose they are. `Device` checks each of them."""
    if not isinstance(entry, dict) or entry.get("format") != FORMAT:
        raise ValueError("it is not a file of measured rates")
    if entry.get("version") != VERSION:
        raise ValueError(f"it is of version {entry.get('version')!r:.20}, not {VERSION}")
    if entry["key"] != dataclasses.asdict(key):
        raise ValueError("it is of another machine or framework")
    fields, rates = rate_fields(), entry["rates"]
    if not isinstance(rates, dict) or set(rates) != set(fields):
        raise ValueError("its fields are others than those of a device")
    for name in _MAY_BE_INFINITE:
        if rates[name] is None:
            rates[name] = math.inf
    rates["products"] = tuple(rates["products"])
    if not isinstance(entry["source"], str):
        raise ValueError("its source is not text")
    return Device(key.kind, kind=key.kind, source=entry["source"][:200], **rates)


# One device does not tell how fast it reaches others.
_NOT_MEASURED = ("capability", "link_bandwidth", "link_seconds")
_MAY_BE_INFINITE = ("fresh_bandwidth", "reused_bandwidth", "cache_bandwidth", "outer_cache_bandwidth")


def rate_fields() -> tuple[str, ...]:
    """Return the fields of `Device` that are measured."""
    others = ("name", "kind", "source", *_NOT_MEASURED)
    return tuple(f.name for f in dataclasses.fields(Device) if f.name not in others)


def write(device: Device, key: Key) -> pathlib.Path:
    """Replace the file of measured rates atomically. If an error occurs, the old file stays in place.

    Raises:
        OSError: the folder cannot be written.
    """
    path = path_of(key)
    rates = {name: getattr(device, name) for name in rate_fields()}
    entry = {
        "format": FORMAT,
        "version": VERSION,
        "key": dataclasses.asdict(key),
        "source": device.source,
        "rates": {name: None if value == math.inf else value for name, value in rates.items()},
    }
    write_json(path, entry)
    load_rates.cache_clear()
    return path
