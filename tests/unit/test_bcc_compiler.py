# SPDX-License-Identifier: Apache-2.0
"""appliance/probes/bcc_compiler.py: headers in one tree, and functions up to their end."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest

from appliance.probes import bcc_compiler
from appliance.probes.bcc_compiler import NoHeadersError, find_headers, up_to_end

NEEDED = ("include/linux/kconfig.h", "include/generated/autoconf.h")


@pytest.fixture(autouse=True)
def _no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    monkeypatch.setattr(bcc_compiler, "_SOURCES", tmp_path / "src")
    monkeypatch.setattr(bcc_compiler, "_BUILD", tmp_path / "build")


def put(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"{directory.name}\n")


def test_headers_in_two_parts_become_one_tree(tmp_path: Path) -> None:
    common = tmp_path / "src/linux-headers-6.1.0-9-common"
    machine = tmp_path / "src/linux-headers-6.1.0-9-amd64"
    put(common, NEEDED[0], "arch/x86/include/asm/page.h", "Makefile")
    put(machine, NEEDED[1], "arch/x86/include/generated/asm/rwonce.h", "Makefile")
    (machine / "scripts").symlink_to("nowhere")
    links = tmp_path / "links"
    links.mkdir()
    found = find_headers(links)
    for name in (*NEEDED, "arch/x86/include/asm/page.h", "arch/x86/include/generated/asm/rwonce.h"):
        assert (found / name).exists()
    assert (found / "Makefile").read_text() == f"{common.name}\n"


def test_those_of_the_running_kernel_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "build", *NEEDED)
    put(tmp_path / "chosen", *NEEDED)
    assert find_headers(tmp_path) == tmp_path / "build"
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(tmp_path / "chosen"))
    assert find_headers(tmp_path) == tmp_path / "chosen"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BCC_KERNEL_SOURCE", "chosen")
    assert find_headers(tmp_path) == tmp_path / "chosen"
    monkeypatch.setenv("BCC_KERNEL_SOURCE", "/nowhere")
    with pytest.raises(NoHeadersError, match="BCC_KERNEL_SOURCE is /nowhere, where there is not"):
        find_headers(tmp_path)


def test_an_empty_choice_of_headers_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "build", *NEEDED)
    monkeypatch.setenv("BCC_KERNEL_SOURCE", "")
    assert find_headers(tmp_path) == tmp_path / "build"


def test_the_newest_that_are_whole_are_taken(tmp_path: Path) -> None:
    for version in ("6.1.0-9", "6.1.0-10", "6.12.9"):
        put(tmp_path / f"src/linux-headers-{version}-common", NEEDED[0])
        put(tmp_path / f"src/linux-headers-{version}-amd64", NEEDED[1])
    (tmp_path / "src/linux-headers-6.12.9-common" / NEEDED[0]).unlink()
    links = tmp_path / "links"
    links.mkdir()
    found = find_headers(links)
    assert (found / NEEDED[0]).resolve().read_text() == "linux-headers-6.1.0-10-common\n"


def test_without_headers_it_is_said_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(NoHeadersError, match="install linux-headers of any version"):
        find_headers(tmp_path)


def instructions(*some: tuple[int, int, int]) -> ctypes.Array[ctypes.c_char]:
    """Each its code, how far it jumps, and a number."""
    return ctypes.create_string_buffer(
        b"".join(struct.pack("=BBhi", code, 0, offset, number) for code, offset, number in some)
    )


MOVE, IF, IF_32, GO_TO, CALL, EXIT, LOAD_64 = 0xB7, 0x15, 0x16, 0x05, 0x85, 0x95, 0x18


@pytest.mark.parametrize(
    ("count", "some"),
    [
        (2, [(MOVE, 0, 0), (EXIT, 0, 0), (EXIT, 0, 0)]),
        # What follows a return is reached from before it.
        (4, [(IF, 1, 0), (EXIT, 0, 0), (MOVE, 0, 0), (EXIT, 0, 0), (EXIT, 0, 0)]),
        (4, [(IF_32, 1, 0), (EXIT, 0, 0), (MOVE, 0, 0), (EXIT, 0, 0), (EXIT, 0, 0)]),
        # It ends by going back.
        (4, [(IF, 2, 0), (MOVE, 0, 0), (EXIT, 0, 0), (GO_TO, -3, 0), (EXIT, 0, 0)]),
        # The second half of a number looks like a return, and a call's distance is none.
        (4, [(LOAD_64, 0, 0), (EXIT, 0, 0), (CALL, 9, 0), (EXIT, 0, 0), (EXIT, 0, 0)]),
    ],
)
def test_a_function_ends_where_nothing_leads_further(
    count: int, some: list[tuple[int, int, int]]
) -> None:
    memory = instructions(*some)
    assert len(up_to_end(ctypes.addressof(memory))) == 8 * count
