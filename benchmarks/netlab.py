"""Hosts on one machine, with links of a set rate between them: network namespaces and `tc`.

    with Lab(hosts=4, rate="1gbit") as lab:
        lab.run([sys.executable, "train.py"])  # Once on each host, with RANK and COORDINATOR set.

Each host is a network namespace whose one interface leads to a switch in one more namespace, shaped
both ways by a token bucket. Nothing of it is seen from outside: every lab may use the same
addresses. It needs Linux, root and iproute2, and adds neither delay nor loss.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

NETDEV = "eth0"  # The interface of every host.
PORT = 9911  # Of the coordinator.
# Whole segments of TCP (64 KiB) pass; more would be sent at once after a pause.
_SHAPE = ("burst", "256kb", "latency", "50ms")

_labs = itertools.count()


class Unavailable(RuntimeError):
    """A lab can't be had on this machine."""


class Lab:
    """Some hosts and a switch.

    Attributes:
      names: the hosts' namespaces.
      addresses: their addresses.
    """

    def __init__(self, hosts: int, rate: str) -> None:
        """Plans a lab; `with` makes it and takes it away.

        Args:
          hosts: how many, at most 250.
          rate: of each link in each direction, as `tc` writes it: "1gbit", "200mbit".
        """
        if not 1 <= hosts <= 250:
            raise ValueError(f"hosts must be from 1 to 250, got {hosts}")
        prefix = f"jax-ring-{os.getpid()}-{next(_labs)}"
        self.rate = rate
        self.names = [f"{prefix}-h{i}" for i in range(hosts)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(hosts)]
        self._switch = f"{prefix}-switch"
        self._port = itertools.count(PORT)

    def __enter__(self) -> Lab:
        """Makes the hosts.

        Raises:
          Unavailable: if this machine or this user can't.
        """
        for tool in ("ip", "tc"):
            if not shutil.which(tool):
                raise Unavailable(f"network namespaces take iproute2, and there is no `{tool}`")
        if os.geteuid():
            raise Unavailable("network namespaces take root")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise Unavailable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Takes them away, with their interfaces."""
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(_settings(name), ignore_errors=True)

    def _make(self) -> None:
        _call("ip", "netns", "add", self._switch)
        _call("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{i}"
            _call("ip", "netns", "add", name)
            link = ("link", "add", NETDEV, "netns", name, "type", "veth")
            _call("ip", *link, "peer", "name", port, "netns", self._switch)
            _call("ip", "-n", name, "address", "add", f"{address}/24", "dev", NETDEV)
            _call("ip", "-n", name, "link", "set", "lo", "up")
            _call("ip", "-n", name, "link", "set", NETDEV, "up")
            _call("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            # Gloo asks for the address of the machine's own name.
            hosts = [f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"]
            hosts += [f"{a} {n}\n" for a, n in zip(self.addresses, self.names, strict=True)]
            _settings(name).mkdir(parents=True)
            (_settings(name) / "hosts").write_text("".join(hosts))
        self.shape(self.rate)

    def shape(self, rate: str) -> None:
        """Sets the rate of every link, in both directions."""
        for i, name in enumerate(self.names):
            for where, device in ((name, NETDEV), (self._switch, f"port{i}")):
                shape = ("root", "tbf", "rate", rate, *_SHAPE)
                _call("tc", "-n", where, "qdisc", "replace", "dev", device, *shape)
        self.rate = rate

    def cut(self, host: int) -> None:
        """Takes a host off the network, for good: its peers hear nothing more of it."""
        _call("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def sent_bytes(self, host: int) -> int:
        """What a host has sent so far, headers included."""
        found = _call("ip", "-n", self.names[host], "-s", "-json", "link", "show", NETDEV)
        return int(json.loads(found)[0]["stats64"]["tx"]["bytes"])

    def coordinator(self) -> str:
        """An address and port on host 0 that nobody uses."""
        # A port that was in use just now may not be free yet.
        return f"{self.addresses[0]}:{next(self._port)}"

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str] = {}, **options: Any
    ) -> subprocess.Popen[str]:
        """Starts a command on a host; options are those of `subprocess.Popen`."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *command],
            env={**os.environ, **environment},
            text=True,
            **options,
        )

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] = {},
        *,
        timeout: float = 300.0,
    ) -> list[str]:
        """Runs a command on every host at once.

        Args:
          command: the program and its arguments.
          environment: variables beside this process's and those for `jax.distributed.initialize`:
            COORDINATOR, RANK and WORLD_SIZE.
          timeout: seconds.

        Returns:
          What each host's command wrote to its standard output.

        Raises:
          RuntimeError: if one fails or does not end in time, with the end of what it said. None is
            left running.
        """
        size = str(len(self.names))
        shared = {"WORLD_SIZE": size, "COORDINATOR": self.coordinator()}
        with contextlib.ExitStack() as stack:
            started = []
            for host in range(len(self.names)):
                files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
                variables = {**environment, **shared, "RANK": str(host)}
                process = self.start(host, command, variables, stdout=files[0], stderr=files[1])
                stack.callback(_end, process)
                started.append((process, files))
            _wait([process for process, _ in started], timeout)
            said = [[_content(file) for file in files] for _, files in started]
        for host, (process, _) in enumerate(started):
            if process.returncode > 0:
                raise RuntimeError(
                    f"host {host} ended with status {process.returncode}: {said[host][1][-3000:]}"
                )
        return [out for out, _ in said]


def _settings(name: str) -> pathlib.Path:
    """What `ip netns exec` shows a namespace in place of files in /etc."""
    return pathlib.Path("/etc/netns") / name


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def _content(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def _wait(processes: list[subprocess.Popen[str]], timeout: float) -> None:
    """Until all have ended, or one has failed."""
    end = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            return
        if time.monotonic() > end:
            slow = [i for i, process in enumerate(processes) if process.poll() is None]
            raise RuntimeError(f"hosts {slow} did not end within {timeout} s")
        time.sleep(0.05)
