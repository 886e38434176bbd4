"""Single values against their rules; numbers are read as C reads them."""

from __future__ import annotations

import ctypes
import random

import pytest

from hpcrun.tuning.registry.registry import Version, value_in_release, variable_registry
from hpcrun.tuning.registry.values import check_value, parse_c_integer

NEW = (2, 27, 5)


def told(name: str, value: str, version: Version | None = NEW) -> str:
    rule = value_in_release(variable_registry().variables[name].values, version)
    assert rule is not None
    return "\n".join(f"{one.severity} {one.message}" for one in check_value(name, value, rule, version))


def test_numbers_are_those_of_strtoll() -> None:
    strtoll = ctypes.CDLL(None).strtoll
    strtoll.restype = ctypes.c_longlong
    strtoll.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int]
    dice = random.Random(5)
    whole = 0
    for _ in range(5000):
        text = "".join(dice.choices("0123456789xXaF+-8 ", k=dice.randint(1, 8)))
        end, buffer = ctypes.c_char_p(), ctypes.create_string_buffer(text.encode())
        value = strtoll(ctypes.cast(buffer, ctypes.c_char_p), ctypes.byref(end), 0)
        rest = end.value or b""
        # A blank or a sign alone is nothing: then the end is the beginning.
        is_whole = not rest.strip() and rest != text.encode()
        found = parse_c_integer(text)
        assert found == (value if is_whole else None), text
        whole += is_whole
    assert whole > 500


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NCCL_IB_RETRY_CNT", "15", "error '15' is out of range; allowed: 0 to 7"),
        ("NCCL_IB_TC", "300", "error '300' is out of range; allowed: -1 to 255"),
        ("NCCL_IB_TIMEOUT", "40", "allowed: 0 to 31"),
        ("NCCL_BUFFSIZE", "4M", "error '4M': units are not read, it counts as 4 bytes; write 4194304"),
        ("NCCL_BUFFSIZE", "1.5KiB", "counts as 1 bytes; write 1536"),
        ("NCCL_IB_DISABLE", "true", "error 'true' is not a number and reads as 0; write 1"),
        ("NCCL_IB_DISABLE", "2", "warning '2': 0 and 1 are all that it knows"),
        ("NCCL_IB_SL", "1,", "error '1,' is not a number and reads as 1; allowed: -1 to 15"),
        ("NCCL_IB_TC", "0106", "warning '0106' begins with 0 and is read as octal: 70"),
        ("NCCL_NET_GDR_LEVEL", "phb", "error 'phb' is ignored; write PHB, capitals count"),
        ("NCCL_NET_GDR_LEVEL", "3", "note '3' is the old numbering"),
        ("NCCL_P2P_LEVEL", "NVLINK", "is not known and ignored; did you mean NVL?"),
        ("NCCL_SOCKET_FAMILY", "af_inet", "write AF_INET, capitals and blanks count"),
        ("NCCL_IB_ADDR_RANGE", "10.0.0.0/33", "is not a network"),
        ("NCCL_IB_ADDR_RANGE", "10.0.0.0", "has no length of prefix"),
        ("NCCL_DEBUG", "WARNING", "error 'WARNING' is not known; did you mean WARN?"),
        (
            "NCCL_DEBUG_SUBSYS",
            "INIT,NETWORK",
            "warning 'NETWORK' is not known and is left out; did you mean NET?",
        ),
        ("NCCL_RAS_TIMEOUT_FACTOR", "0.5", "reads as 0; allowed: 1 and above"),
        ("NCCL_RAS_ADDR", "localhost", "write host:port"),
        ("NCCL_NETDEVS_POLICY", "MAX:0", "allowed: AUTO, ALL, MAX:n"),
        ("NCCL_TOPO_FILE", "~/topo.xml", "~ is not replaced"),
        ("NCCL_MIN_NCHANNELS", "112", "out of range; allowed: 1 to 64"),
        ("UCX_IB_TRAFFIC_CLASS", "256", "allowed: 0 to 255"),
    ],
)
def test_wrong_values(name: str, value: str, words: str) -> None:
    assert words in told(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_IB_TC", "106"),
        ("NCCL_IB_TC", "0x6a"),
        ("NCCL_IB_TC", "-1"),
        ("NCCL_DEBUG", "info"),
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_NET_GDR_LEVEL", "PXN"),
        ("NCCL_IB_ADDR_RANGE", "fd02::/16"),
        ("NCCL_DEBUG_SUBSYS", "^COLL,NET"),
        ("NCCL_RAS_ADDR", "[::1]:28028"),
        ("NCCL_NETDEVS_POLICY", "MAX:1"),
        ("NCCL_SOCKET_MAGIC", "0xdeadbeef"),
        ("UCX_IB_TRAFFIC_CLASS", "auto"),
        ("NCCL_BUFFSIZE", ""),
    ],
)
def test_good_values(name: str, value: str) -> None:
    assert told(name, value) == ""


def test_what_is_allowed_changes_with_the_release() -> None:
    assert "1 to 32" in told("NCCL_MAX_CTAS", "48", (2, 20, 5))
    assert told("NCCL_MAX_CTAS", "48", (2, 25, 1)) == ""
    assert "0 to 2" in told("NCCL_CTA_POLICY", "EFFICIENCY", (2, 28, 3))
    assert told("NCCL_CTA_POLICY", "EFFICIENCY|ZERO", (2, 29, 7)) == ""
    assert "ATTN" in told("NCCL_DEBUG", "ATTN", (2, 31, 1))
    assert told("NCCL_DEBUG", "ATTN", (2, 32, 3)) == ""


def test_any_value_of_any_variable_gives_lines_and_no_exception() -> None:
    dice = random.Random(6)
    texts = [
        "".join(dice.choices("0123456789.,:;^=~/x\t\n\0é\udc80AB-+", k=dice.randint(1, 30)))
        for _ in range(20)
    ]
    for name in variable_registry().variables:
        for text in [*texts, "9" * 5000, "-", "٣"]:
            for line in told(name, text, None).splitlines():
                assert len(line) < 700
