"""`python -m ci.bench [NAME...]`: runs the benchmarks one after another and keeps what they print under runs/bench/."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    """Runs the named benchmarks, or all; the status is non-zero where one of them failed."""
    names = sorted(
        path.stem for path in HERE.glob("*.py") if "def main(" in path.read_text() and path.stem != "__main__"
    )
    parser = argparse.ArgumentParser(prog="python -m ci.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(names)}; default: all")
    chosen = parser.parse_args().names or names
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        parser.error(f"no benchmark named {unknown[0]!r}; there are: {', '.join(names)}")
    results = Path("runs/bench")
    results.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in chosen:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        with (results / f"{name}.txt").open("w") as copy:
            job = subprocess.Popen([sys.executable, "-m", f"ci.bench.{name}"], stdout=subprocess.PIPE, text=True)
            assert job.stdout is not None
            for line in job.stdout:
                print(line, end="", flush=True)
                copy.write(line)
        if job.wait():
            failed.append(name)
        print(f"== {name}: {time.monotonic() - start:.0f} s, status {job.returncode}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
