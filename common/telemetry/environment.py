"""The machine and software a run ran on, and the memory it took."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from common.runtime import Runtime
from common.telemetry.peak import processor_name


def describe_environment(runtime: Runtime) -> dict[str, Any]:
    """What somebody needs to judge or repeat the run: software versions, processor, memory, ranks, command, commit."""
    described: dict[str, Any] = {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else "",
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "host": platform.node(),
        "processor": f"{processor_name()}, {os.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "threads_per_rank": torch.get_num_threads(),
        "ranks": f"{runtime.world_size} ({runtime.local_world_size} on this node)",
        "layout": ", ".join(f"{axis}={size}" for axis, size in runtime.layout.sizes().items() if size > 1) or "1 rank",
    }
    if runtime.device.type == "cuda":
        described["accelerator"] = torch.cuda.get_device_name(runtime.device)
        described["cuda"] = torch.version.cuda
    return described


def peak_memory(device: torch.device) -> tuple[float, float]:
    """Highest resident set of this process so far and highest memory allocated on its CUDA device (0 on CPU), bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts kilobytes on Linux
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    allocated = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return float(resident), float(allocated)


def _commit() -> str:
    """Commit of the source tree, with a mark where it was changed; empty where there is none."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
