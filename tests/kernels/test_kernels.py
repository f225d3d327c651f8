# SPDX-License-Identifier: Apache-2.0
"""The kernel matrix, and what it is made of."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path

import pytest

from appliance.probes.native import Loader
from tests.kernels.__main__ import mistakes, run
from tests.kernels.initramfs import archive, libraries
from tests.kernels.matrix import CASES, OBJECTS, Found, parse
from tests.kernels.packages import KernelsError, backports, newest_of_each

SOURCE = """Types: deb
URIs: http://mirror.example/debian
Suites: {}
Components: main"""


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(900)
def test_the_probes_work_on_every_kernel_that_apt_offers() -> None:
    wrong = run(print)
    # At least that of this release.
    assert any(kernel.startswith("6.1.") for kernel in wrong)
    assert {kernel: mistaken for kernel, mistaken in wrong.items() if mistaken} == {}


def test_the_newest_of_each_series_is_booted() -> None:
    assert newest_of_each(
        [
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64-dbg",
            "linux-image-6.1.0-99-amd64",
            "linux-image-6.12.9+deb12-cloud-amd64",
            "linux-image-6.12.94+deb12-cloud-amd64",
            "linux-image-6.12-cloud-amd64",
            "linux-image-cloud-amd64",
        ]
    ) == ["linux-image-6.1.0-56-cloud-amd64", "linux-image-6.12.94+deb12-cloud-amd64"]


def test_backports_come_from_where_the_release_comes() -> None:
    found = backports(
        [SOURCE.format("bookworm-security"), SOURCE.format("bookworm bookworm-updates")],
        "bookworm",
    )
    assert found == SOURCE.format("bookworm-backports")
    with pytest.raises(KernelsError, match="no trixie"):
        backports([SOURCE.format("bookworm")], "trixie")


def test_an_archive_is_what_cpio_reads(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(
        gzip.decompress(archive({"init": b"#!", "lib/deep/er/x.so": b"odd"}))
    )
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    with (tmp_path / "archive").open("rb") as packed:
        subprocess.run(
            ["cpio", "--extract", "--quiet", "--make-directories", "--nonmatching", "dev/console"],
            stdin=packed, cwd=unpacked, check=True,
        )  # fmt: skip
    assert (unpacked / "init").read_bytes() == b"#!"
    assert (unpacked / "lib/deep/er/x.so").read_bytes() == b"odd"
    assert (unpacked / "init").stat().st_mode & 0o777 == 0o755


def test_a_program_comes_with_its_libraries(build: Path) -> None:
    names = {path.name.partition(".")[0] for path in libraries(build / "tests/guest")}
    assert {"libbpf", "libelf", "libbacksight", "libc"} <= names


GOOD = "\n".join(
    [
        "[    0.1] Linux version",
        '{"kernel": "6.18.1-cloud"}',
        *(f'{{"object": "{name}", "error": ""}}' for name in OBJECTS),
        *(f'{{"case": "{name}", "right": true}}' for name in CASES),
        '{"done": true}',
    ]
)


def test_what_the_guest_says_is_read() -> None:
    found = parse(GOOD)
    assert (found.kernel, found.errors) == ("6.18.1-cloud", dict.fromkeys(OBJECTS, ""))
    assert found.cases == dict.fromkeys(CASES, True)


def test_a_guest_that_does_not_get_to_its_end_has_failed() -> None:
    with pytest.raises(KernelsError, match=r"not get to its end:\n.*Linux version"):
        parse(GOOD.replace('{"done": true}', ""))


def test_everything_that_is_missing_is_a_mistake() -> None:
    nothing = mistakes(Found("5.10.0"), Loader.CORE)
    assert len(nothing) == len(OBJECTS) + len(CASES) + 1
    found = parse(GOOD.replace("true", "false", 1).replace('"error": ""', '"error": "no"', 1))
    assert [text for text in mistakes(found, Loader.CORE) if "verifier" not in text] == [
        f"{OBJECTS[0]} does not attach: no",
        f"{CASES[0]} is not right",
    ]


def test_what_bcc_cannot_have_is_no_mistake() -> None:
    """And it is one if it says that it has it."""

    def wrong(kernel: str, loader: Loader, cases: dict[str, bool]) -> list[str]:
        found = parse(GOOD)
        found.kernel = kernel
        found.errors["sockets"] = "no hook"
        found.cases.update(cases)
        return [text for text in mistakes(found, loader) if "verifier" not in text]

    lost = {"tcp_retransmit": False}
    assert wrong("6.2.9", Loader.BCC, lost) == []
    assert wrong("6.2.9", Loader.BCC, {}) == ["tcp_retransmit is not right"]
    assert wrong("6.3.1", Loader.BCC, lost) == [
        "sockets does not attach: no hook",
        "tcp_retransmit is not right",
    ]
    assert len(wrong("6.2.9", Loader.CORE, lost)) == 2
