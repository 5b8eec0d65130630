"""Hosts on one machine: network namespaces joined by a bridge, with a shaped link to each. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from types import TracebackType


class NoNamespaces(RuntimeError):
    """This machine cannot make network namespaces; the message says what is missing."""


class Hosts:
    """`count` hosts 10.77.0.1, 10.77.0.2, ... whose links to each other have this rate and delay; a context manager.

    mbit_per_s: at which each host sends. delay_ms: one way, between two hosts; 0 for that of the machine itself.
    Everything is removed at the end, also after an error.

    Raises NoNamespaces where root rights, the `ip` and `tc` programs or the kernel's support are missing.
    """

    def __init__(self, count: int, *, mbit_per_s: float, delay_ms: float = 0.0) -> None:
        self.count, self._rate, self._delay = count, mbit_per_s, delay_ms
        self._name = f"h{uuid.uuid4().hex[:6]}"

    def __enter__(self) -> Hosts:
        if os.geteuid() != 0:
            raise NoNamespaces("network namespaces need root; run as root")
        if not (shutil.which("ip") and shutil.which("tc")):
            raise NoNamespaces("the programs ip and tc are missing; install iproute2 (apt-get install iproute2)")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self._remove()
            raise NoNamespaces(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, host: int) -> str:
        """IP address of a host."""
        return f"10.77.0.{host + 1}"

    def start(self, host: int, command: list[str], env: dict[str, str], **options: object) -> subprocess.Popen[str]:
        """Starts a command on a host; gloo there uses the host's interface."""
        return subprocess.Popen(  # type: ignore[call-overload]
            ["ip", "netns", "exec", self._space(host), *command],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", **env},
            text=True,
            **options,
        )

    def _space(self, host: int) -> str:
        return f"{self._name}-{host}"

    def _make(self) -> None:
        switch = self._space(
            self.count
        )  # a namespace of its own holds the bridge, so the machine's network is untouched
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for host in range(self.count):
            space, port = self._space(host), f"p{host}"
            _run("ip", "netns", "add", space)
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            # A token bucket caps the rate; only netem can delay, and not every kernel has it.
            shape = ["tbf", "rate", f"{self._rate}mbit", "burst", "256kb", "latency", "100ms"]
            if self._delay:
                shape = ["netem", "rate", f"{self._rate}mbit", "delay", f"{self._delay}ms", "limit", "100000"]
            _run("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", *shape)

    def _remove(self) -> None:
        for host in range(self.count + 1):
            subprocess.run(["ip", "netns", "del", self._space(host)], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
