from ipaddress import ip_address

import pytest

from models.access.addresses import AddressRefused, Allowed, Target, check, is_public, target_of

PRIVATE = [
    "0.0.0.0",  # noqa: S104
    "10.1.2.3",
    "100.64.0.1",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:0:7f00:1::",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:0808:0808::1",
    "3fff::1",
    "fc00::1",
    "fd12:3456::1",
    "fe80::1",
    "fec0::1",
    "ff02::1",
]
PUBLIC = ["8.8.8.8", "100.63.255.255", "100.128.0.1", "172.32.0.1", "2606:4700::1111"]
PUBLIC += ["::ffff:8.8.8.8", "64:ff9b::808:808", "2a00:1450:4001::1"]
HTTPS = Target("https", "example.org", 443, "/")


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_refused(address: str):
    assert not is_public(ip_address(address))
    with pytest.raises(AddressRefused, match="not public"):
        check(HTTPS, [address], Allowed())
    with pytest.raises(AddressRefused):
        check(HTTPS, ["8.8.8.8", address], Allowed())


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_taken_over_tls_only(address: str):
    assert is_public(ip_address(address))
    check(HTTPS, [address], Allowed())
    with pytest.raises(AddressRefused, match="https"):
        check(Target("http", "example.org", 80, "/"), [address], Allowed())


def test_what_is_allowed_by_name_or_network_is_taken():
    allowed = Allowed.of("10.0.0.0/8, hooks.internal,::1")
    check(Target("http", "x", 80, "/"), ["10.9.8.7"], allowed)
    check(Target("http", "x", 80, "/"), ["::1"], allowed)
    check(Target("http", "hooks.internal", 80, "/"), ["192.168.0.1"], allowed)
    with pytest.raises(AddressRefused):
        check(Target("http", "other.internal", 80, "/"), ["192.168.0.1"], allowed)
    with pytest.raises(AddressRefused):
        check(HTTPS, ["10.0.0.1", "127.0.0.1"], allowed)


@pytest.mark.parametrize("entry", ["10.0.0.1/8", "a b", "10.0.0.0/99", "-x"])
def test_an_entry_that_is_neither_network_nor_name_is_refused(entry: str):
    with pytest.raises(ValueError, match="neither"):
        Allowed.of(entry)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.org",
        "//example.org/",
        "file:///etc/passwd",
        "ftp://example.org/",
        "gopher://127.0.0.1:6379/_FLUSHALL",
        "unix:///run/valkey.sock",
        "https://",
        "https://:443/",
        "https://user@example.org/",
        "https://user:word@example.org/",
        "https://example.org@127.0.0.1/",
        "https://example.org\\@127.0.0.1/",
        "https://exa mple.org/",
        "https://example.org/\r\nHost: evil",
        "https://example.org/\t",
        "https://example.org:99999/",
        "https://example.org:x/",
        "https://[::1/",
        "https://[fe80::1%25eth0]/",
        "https://ex%61mple.org/",
        "https://éxample.org/",
        "https://example..org/",
        "https://example.org/" + "x" * 3000,
    ],
)
def test_a_url_that_is_not_plain_is_refused(url: str):
    with pytest.raises(AddressRefused):
        target_of(url)


def test_a_plain_url_is_parsed():
    found = target_of("https://Hooks.Example.org:8443/a/b?c=d#e")
    assert found == Target("https", "hooks.example.org", 8443, "/a/b?c=d")
    assert found.authority == "hooks.example.org:8443"
    assert target_of("http://[::1]").authority == "[::1]"
    assert target_of("http://example.org.").host == "example.org"
