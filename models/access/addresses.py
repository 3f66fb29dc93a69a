"""Restrict connections to addresses that users name: only public ones are allowed.

The service connects to user-supplied addresses only through this check. A name is resolved once,
all its addresses are checked here, and the connection goes to a checked address. So a name that
later resolves to another machine has no effect.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from urllib.parse import urlsplit

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_NOT_PUBLIC_4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # carriers' NAT
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local, including cloud metadata services
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
_GLOBAL_6 = IPv6Network("2000::/3")
_NOT_PUBLIC_6 = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # protocols, including Teredo
        "2001:db8::/32",
        "2002::/16",  # 6to4
        "3fff::/20",
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?")
_MAX_URL = 2048


class AddressRefused(ValueError):
    """The service does not connect there. The text tells the user why."""


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of an accepted URL."""

    scheme: str
    host: str
    port: int
    path: str
    """Includes the query."""

    @property
    def authority(self) -> str:
        """Return the value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.scheme == "https" else 80
        return host if self.port == usual else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Allowed:
    """Hosts and networks that are allowed although they are not public."""

    hosts: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()

    @staticmethod
    def of(setting: str) -> "Allowed":
        """Read ``GLASSHOUSE_OUTBOUND_ALLOW``: networks and host names, separated by commas.

        Raises:
            ValueError: An entry is neither.
        """
        hosts: set[str] = set()
        networks: list[Network] = []
        for entry in (part.strip().lower() for part in setting.split(",")):
            if not entry:
                continue
            try:
                networks.append(ip_network(entry))
            except ValueError:
                if "/" in entry or not _HOST.fullmatch(entry):
                    raise ValueError(f"{entry!r} is neither a network nor a host name") from None
                hosts.add(entry.rstrip("."))
        return Allowed(frozenset(hosts), tuple(networks))

    def has(self, host: str, address: Address) -> bool:
        """Return whether the host's name or this address is on the list."""
        if host in self.hosts:
            return True
        return any(address in network for network in self.networks)


def target_of(url: str) -> Target:
    """Parse a URL strictly.

    Raises:
        AddressRefused: It is not a plain http or https URL.
    """
    if len(url) > _MAX_URL or not url.isascii() or re.search(r"[\x00-\x20\x7f\\]", url):
        raise AddressRefused(f"the URL must have at most {_MAX_URL} plain ASCII characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise AddressRefused(f"the URL cannot be read: {error}") from None
    if parts.scheme not in {"http", "https"}:
        raise AddressRefused("the URL must begin with https:// (or http://)")
    if "@" in parts.netloc:
        raise AddressRefused("the URL must not hold a user name or password")
    host = (parts.hostname or "").rstrip(".")
    if not _is_address(host) and not _HOST.fullmatch(host):
        raise AddressRefused("the URL names no host")
    path = parts.path or "/"
    if parts.query:
        path += f"?{parts.query}"
    usual = 443 if parts.scheme == "https" else 80
    return Target(parts.scheme, host, usual if port is None else port, path)


def check(target: Target, addresses: Sequence[str], allowed: Allowed) -> None:
    """Check every address of a target's host: one that is not public refuses all.

    Raises:
        AddressRefused: The service does not connect there.
    """
    if not addresses:
        raise AddressRefused(f"the host {target.host!r} has no address")
    for text in addresses:
        address = ip_address(text.partition("%")[0])
        known = allowed.has(target.host, address)
        if not known and not is_public(address):
            raise AddressRefused(
                f"the host {target.host!r} has the address {address}, which is not public; "
                "GLASSHOUSE_OUTBOUND_ALLOW can allow it"
            )
        if not known and target.scheme != "https":
            raise AddressRefused(
                "plain http is for hosts of GLASSHOUSE_OUTBOUND_ALLOW only; use https"
            )


def is_public(address: Address) -> bool:
    """Return whether an address is on the public internet, in any notation."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped
        if inner is None and address in _NAT64:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is None:
            return address in _GLOBAL_6 and not any(address in net for net in _NOT_PUBLIC_6)
        address = inner
    return not any(address in network for network in _NOT_PUBLIC_4)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return "%" not in host
