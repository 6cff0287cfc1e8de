"""Where the processes of torchrun are: on one host or on several, and by which address they reach each other."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def several() -> bool:
    """Whether torchrun started processes on other hosts too, or by another launcher on this one."""
    return os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]) != os.environ["WORLD_SIZE"]


def node() -> int:
    """The number of this process's launcher: its host, as a rule."""
    return int(os.environ.get("GROUP_RANK", "0"))


def speaks() -> bool:
    """Whether this process is the one that speaks for its host."""
    return os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0"


def name() -> str:
    """This host in words, for an error that is read on another one."""
    return f"node {node()} ({socket.gethostname()})"


def address() -> str:
    """The address of this host that the other ranks need: the loopback, or the one that faces MASTER_ADDR."""
    if not several():
        return "127.0.0.1"
    found = socket.getaddrinfo(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, master = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(master)  # sends nothing, but chooses the way
        return str(probe.getsockname()[0])


def listen_there_only() -> None:
    """Let gloo and NCCL use the interface of `address()` alone, unless the environment names one already."""
    interface = _interface(address())
    if interface is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface)


def _interface(wanted: str) -> str | None:
    """The name of the interface with this address; None where the system does not tell."""
    names = [name for _, name in socket.if_nameindex()]
    if wanted.startswith("127."):
        return next((name for name in names if name in ("lo", "lo0")), None)
    if sys.platform.startswith("linux"):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for name in names:
                with contextlib.suppress(OSError):
                    found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    if socket.inet_ntoa(found[20:24]) == wanted:
                        return name
    return None
