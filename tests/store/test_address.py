from __future__ import annotations

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.transfer.store.address import Address, parse_address


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("valkey://h", Address(kind="tcp", shown="valkey://h", host="h")),
        ("valkey://h/", Address(kind="tcp", shown="valkey://h/", host="h")),
        ("redis://h:1/3", Address(kind="tcp", shown="redis://h:1/3", host="h", port=1, db=3)),
        ("REDIS://h:1", Address(kind="tcp", shown="redis://h:1", host="h", port=1)),
        ("valkey://[::1]:7", Address(kind="tcp", shown="valkey://[::1]:7", host="::1", port=7)),
        ("valkey://me:pw@h", Address(kind="tcp", shown="valkey://h", host="h", username="me", password="pw")),
        ("valkey://:pw@h", Address(kind="tcp", shown="valkey://h", host="h", password="pw")),
        ("valkey://m%40e:p%2F%3A@h", Address(kind="tcp", shown="valkey://h", host="h", username="m@e", password="p/:")),
        ("valkeys://h", Address(kind="tls", shown="valkeys://h", host="h")),
        (
            "rediss://:pw@h:2/1?ca=/ca.pem&cert=/c%20.pem&key=/k.pem",
            Address(kind="tls", shown="rediss://h:2/1", host="h", port=2, db=1, password="pw", ca="/ca.pem", cert="/c .pem", key="/k.pem"),
        ),
        ("unix:///run/v.sock", Address(kind="unix", shown="unix:///run/v.sock", path="/run/v.sock")),
        ("unix://me:pw@/v?db=2", Address(kind="unix", shown="unix:///v", path="/v", db=2, username="me", password="pw")),
    ],
)
def test_what_a_url_names(url: str, address: Address) -> None:
    assert parse_address(url) == address


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "no URL"),
        ("localhost:6379", "no URL"),
        ("user:secret@localhost", "no URL"),
        ("http://:secret@h", "http://"),
        ("valkey:/:secret@h", "no URL"),
        ("valkey://", "names no host"),
        ("valkey://:secret@", "names no host"),
        ("valkey://:secret@h:0", "between 1 and 65535"),
        ("valkey://:secret@h:65536", "cannot be read"),
        ("valkey://:secret@h:port", "cannot be read"),
        ("valkey://:sec#secret@h", "cannot be read"),
        ("valkey://:sec/secret@h", "cannot be read"),
        ("valkey://me:1/secret@h", "cannot be read"),
        ("valkeys://me:1?secret=secret@h", "cannot be read"),
        ("unix://:1/secret@/v", "cannot be read"),
        ("valkey://[::1:secret@", "cannot be read"),
        ("valkey://:secret@h/one", "'one' is not a number"),
        ("valkey://:secret@h/-1", "is not a number"),
        ("valkey://:secret@h/1/2", "is not a number"),
        ("valkey://:secret@h?ca=/ca.pem", "nothing may follow"),
        ("valkeys://:secret@h?verify=no", "only ca, cert, key may follow"),
        ("valkeys://:secret@h?ca", "cannot be read"),
        ("unix://:secret@run/v.sock", "whole path"),
        ("unix://", "whole path"),
        ("unix:///", "whole path"),
        ("unix://:secret@/v?db=x", "is not a number"),
    ],
)
def test_what_is_wrong_with_a_url_is_said_without_its_password(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_address(url)
    assert said in raised.value.message
    assert raised.value.param == "kv_store"
    assert "secret" not in raised.value.message
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
