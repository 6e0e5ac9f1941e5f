"""Two network namespaces joined by a link of a chosen rate: a real, slow network on one machine.

    ranks of the first half -> cddp-<pid>-0 == veth, shaped by tc tbf on both ends == cddp-<pid>-1 <- the other half

Torch's elastic launcher starts its ranks in its own namespace and points them at a store on the host, which neither of
the two namespaces can reach. So ranks on a link are started one by one with `ip netns exec` and meet at a store on
rank 0's end of the link.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LOOPBACK = "loopback"


class LinkUnavailable(RuntimeError):
    """The shaped link cannot be made here; the message says why and what to do."""


def parse_rate(text: str) -> str:
    """`text` as a rate that tc understands, for example "1gbit" or "600mbit"."""
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", text):
        raise ValueError(f"--link expects 'loopback' or a rate like '1gbit' or '600mbit', found '{text}'")
    return text


def unavailable_reason() -> str | None:
    """Why this process cannot make a link, or None if nothing speaks against trying."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return "not root; run the same command under sudo"
    return None


def setup_commands(namespaces: Sequence[str], interfaces: Sequence[str], rate: str) -> list[list[str]]:
    """Both namespaces, the veth pair between them, an address and a shaper on each end."""
    (first, second), (near, far) = namespaces, interfaces
    commands = [
        f"ip netns add {first}",
        f"ip netns add {second}",
        f"ip -n {first} link add {near} type veth peer name {far} netns {second}",
    ]
    for number, (namespace, interface) in enumerate(zip(namespaces, interfaces, strict=True), start=1):
        commands += [
            f"ip -n {namespace} link set {interface} addrgenmode none",  # no IPv6: gloo would pick its address
            f"ip -n {namespace} addr add 10.213.0.{number}/24 dev {interface}",
            f"ip -n {namespace} link set lo up",
            f"ip -n {namespace} link set {interface} up",
            f"tc -n {namespace} qdisc add dev {interface} root tbf rate {rate} burst 256kb limit 64mb",
        ]
    return [command.split() for command in commands]


class ShapedLink:
    """Two namespaces of this process, and the link between them from `create` to `remove`. It removes nothing else."""

    STORE_ADDRESS = "10.213.0.1"
    STORE_PORT = "29500"  # always free: the namespace is ours

    def __init__(self, rate: str) -> None:
        self.rate = parse_rate(rate)
        self.namespaces = [f"cddp-{os.getpid()}-{end}" for end in (0, 1)]
        self.interfaces = [f"cddp{os.getpid()}{end}" for end in ("a", "b")]

    def create(self) -> None:
        """Raises LinkUnavailable, and leaves nothing behind, where the link cannot be made."""
        if reason := unavailable_reason():
            raise LinkUnavailable(reason)
        try:
            for command in setup_commands(self.namespaces, self.interfaces, self.rate):
                subprocess.run(command, check=True, capture_output=True, text=True)
        except BaseException as error:
            self.remove()
            if isinstance(error, subprocess.CalledProcessError):
                raise LinkUnavailable(f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}") from error
            raise

    def remove(self) -> None:
        for namespace in self.namespaces:  # takes the interfaces inside along
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)

    def end_of(self, rank: int, world_size: int) -> int:
        """0 or 1: the first half of the ranks sits at one end, the rest at the other."""
        return rank * 2 // world_size

    def command(self, rank: int, world_size: int, arguments: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespaces[self.end_of(rank, world_size)], *arguments]

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        """What a launcher would set, and the interface that gloo has to use."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": self.STORE_ADDRESS,
            "MASTER_PORT": self.STORE_PORT,
            "GLOO_SOCKET_IFNAME": self.interfaces[self.end_of(rank, world_size)],
        }


def sent_bytes() -> int:
    """By all interfaces of this process's network namespace but loopback, unless there is no other."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    sent = {name.strip(): int(numbers.split()[8]) for name, numbers in lines}
    others = [number for name, number in sent.items() if name != "lo" and number]
    return sum(others) if others else sent["lo"]


@contextmanager
def link_or_loopback(rate: str) -> Iterator[ShapedLink | None]:
    """A ready link; None for "loopback", and, with a message that says how to get it, where it cannot be had."""
    if rate == LOOPBACK:
        yield None
        return
    link = ShapedLink(rate)
    try:
        link.create()
    except LinkUnavailable as reason:
        print(
            f"--link {rate} is not available here: {reason}. It needs root, iproute2, and veth and tbf in the kernel."
        )
        print("Falling back to loopback; the table says so.")
        yield None
        return
    try:
        yield link
    finally:
        link.remove()
