"""`python -m ci.bench.collectives`: flat against two-level all-reduce on two "hosts" of two ranks with a slow link.

Also prints what the chooser measured and whether it picked the faster way at each size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from ci.bench.netns import Hosts, NoNamespaces
from common.collectives import all_gather_object
from common.runtime import Runtime
from common.two_level import TwoLevelAllReduce

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
REPEATS = 7


def main() -> int:
    """Runs the benchmark; 0 where it could run, 2 where this machine cannot make namespaces."""
    parser = argparse.ArgumentParser(prog="python -m ci.bench.collectives", description=__doc__)
    parser.add_argument("--mbit-per-s", type=float, default=1000, help="rate of the link between hosts")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one-way delay between hosts (needs netem)")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return 0
    try:
        with Hosts(options.hosts, mbit_per_s=options.mbit_per_s, delay_ms=options.delay_ms) as hosts:
            rows = launch(hosts, options.ranks_per_host)
    except NoNamespaces as error:
        print(f"python -m ci.bench.collectives: {error}", file=sys.stderr)
        return 2
    link = f"{options.mbit_per_s:g} Mbit/s, {options.delay_ms:g} ms"
    print(f"{options.hosts} hosts x {options.ranks_per_host} ranks, {link} between hosts")
    print(rows["explain"])
    print(f"{'bytes':>10} {'flat ms':>9} {'two-level ms':>13} {'flat / two-level':>17} {'chosen':>10} {'faster':>10}")
    for row in rows["sizes"]:
        faster = "two-level" if row["two_level"] < row["flat"] else "flat"
        print(
            f"{row['bytes']:>10,} {1e3 * row['flat']:>9.2f} {1e3 * row['two_level']:>13.2f} "
            f"{row['flat'] / row['two_level']:>17.2f} {row['chosen']:>10} {faster:>10}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def launch(hosts: Hosts, ranks_per_host: int) -> dict:
    """Starts the ranks of every host; returns what rank 0 measured."""
    world_size = hosts.count * ranks_per_host
    jobs = []
    for rank in range(world_size):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank % ranks_per_host),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            "MASTER_ADDR": hosts.address(0),
            "MASTER_PORT": "29577",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "ci.bench.collectives", "--worker"]
        jobs.append(hosts.start(rank // ranks_per_host, command, env, stdout=subprocess.PIPE))
    outputs = [job.communicate(timeout=300)[0] for job in jobs]
    if any(job.returncode for job in jobs):
        raise SystemExit(f"a rank failed: {[job.returncode for job in jobs]}")
    return json.loads(outputs[0].splitlines()[-1])


def worker() -> None:
    """One rank: times both ways, interleaved; rank 0 prints the slowest rank's medians."""
    with Runtime.start(device="cpu", timeout_s=120) as runtime:
        reduce = TwoLevelAllReduce(runtime)
        reduce.calibrate()
        rows = []
        for size in SIZES:
            tensor = torch.ones(size // 4)
            times: dict[str, list[float]] = {"flat": [], "two_level": []}
            for repeat in range(REPEATS + 1):
                for name, way in (("flat", reduce.reduce_flat), ("two_level", reduce.reduce_two_level)):
                    seconds = max(all_gather_object(reduce._time(way, tensor.fill_(1.0)), runtime.group()))
                    if repeat:
                        times[name].append(seconds)
            chosen = "two-level" if reduce.takes_two_levels(size) else "flat"
            medians = {name: statistics.median(values) for name, values in times.items()}
            rows.append({"bytes": size, **medians, "chosen": chosen})
        if runtime.is_main:
            print(json.dumps({"explain": reduce.explain(), "sizes": rows}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
