"""The matmul peak of a machine, measured: what MFU is a share of (Chowdhery et al. 2022, PaLM, appendix B)."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

CPU_SHAPES = ((512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 1024, 1024), (1024, 4096, 1024))
CUDA_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 8192, 8192), (8192, 4096, 16384))
CACHE_NAME = "matmul_peak.json"


@dataclass(frozen=True)
class MatmulPeak:
    """Fastest matmul of one rank's device. shape: (m, n, k) that gave it. rates: "m x n x k" -> median FLOP/s."""

    flops_per_s: float
    shape: tuple[int, int, int]
    rates: dict[str, float]
    machine: str

    def __float__(self) -> float:
        return self.flops_per_s


def measure_matmul_peak(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    *,
    run_dir: Path | None = None,
    seconds: float = 2.0,
) -> MatmulPeak:
    """Best over shapes of the median rate of plain matmuls, 2 m n k FLOP each.

    threads: CPU threads to use (set back afterwards); None takes torch's present number. seconds: time to spend, about.
    run_dir: folder that keeps the result by machine, device, dtype and threads; a second call there does not measure.

    On a CPU that several ranks share, call it on all of them at once: they then measure each other's presence too.
    Raises ValueError where threads or seconds are not positive, or matmul does not know the dtype.
    """
    device = torch.device(device)
    threads = torch.get_num_threads() if threads is None else threads
    if threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds={seconds} must be positive and finite")
    machine = machine_key(device, dtype, threads)
    cached = _read(run_dir, machine)
    if cached is not None:
        return cached
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rates = _measure(device, dtype, seconds)
    except RuntimeError as error:
        raise ValueError(f"the matmul peak of {dtype} on {device} cannot be measured: {error}") from error
    finally:
        torch.set_num_threads(before)
    shape = max(rates, key=lambda shape: rates[shape])
    peak = MatmulPeak(rates[shape], shape, {" x ".join(map(str, key)): rate for key, rate in rates.items()}, machine)
    _keep(run_dir, peak)
    return peak


def machine_key(device: torch.device, dtype: torch.dtype, threads: int) -> str:
    """Names what a peak belongs to: processor, dtype and, on a CPU, threads."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} | {dtype}"
    return f"{processor_name()} x {os.cpu_count()} | {dtype} | {threads} threads"


def processor_name() -> str:
    """Model of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _measure(device: torch.device, dtype: torch.dtype, seconds: float) -> dict[tuple[int, int, int], float]:
    shapes = CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES
    budget = seconds / len(shapes)
    rates: dict[tuple[int, int, int], float] = {}
    for shape in shapes:
        flops = 2.0 * math.prod(shape)
        # A dtype the processor has no units for is hundreds of times slower: its larger shapes would take minutes.
        if rates and flops / max(rates.values()) > budget:
            continue
        rates[shape] = flops / _median_seconds(shape, device, dtype, budget)
    return rates


def _median_seconds(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype, budget: float) -> float:
    """Median time of one matmul [m, k] x [k, n], s; at least three are timed after one that warms up."""
    m, n, k = shape
    left = torch.randn(m, k, device=device).to(dtype)
    right = torch.randn(k, n, device=device).to(dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    cuda = device.type == "cuda"
    times: list[float] = []
    deadline = math.inf
    while len(times) < 4 or time.perf_counter() < deadline:
        if cuda:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(10 if cuda else 1):  # a device is asked for many at once, so that starting them costs nothing
            torch.mm(left, right, out=out)
        if cuda:
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) / (10 if cuda else 1))
        if len(times) == 1:
            deadline = time.perf_counter() + budget
    return statistics.median(times[1:])


def _read(run_dir: Path | None, machine: str) -> MatmulPeak | None:
    try:
        entry = json.loads((Path(run_dir) / CACHE_NAME).read_text())[machine] if run_dir is not None else None
        if entry is None:
            return None
        return MatmulPeak(float(entry["flops_per_s"]), tuple(entry["shape"]), dict(entry["rates"]), machine)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(run_dir: Path | None, peak: MatmulPeak) -> None:
    """Adds `peak` to the run folder's file. A folder that cannot be written costs a measurement, not the run."""
    if run_dir is None:
        return
    path = Path(run_dir) / CACHE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            entries = json.loads(path.read_text())
        except (OSError, ValueError):
            entries = {}
        entries[peak.machine] = asdict(peak)
        beside = path.with_name(f"{CACHE_NAME}.{os.getpid()}")  # several ranks may write at once
        beside.write_text(json.dumps(entries, indent=1))
        beside.replace(path)
    except OSError:
        pass
