# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a file of triggers is told by line and key, and stops no application."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from testbed.venvs import clean_environment
from tests.otel.conftest import REPOSITORY

DIGITS = ", of at most three digits after the point"

# A file; what is complained of, F for the file; the rules that hold all the same.
FILES = {
    "good": (
        (
            "error: {burst: 5}\nlatency:\nrare: {attribute: http.route}\ndry_run: true\n"
            "when:\n- {name: a, kind: server, attributes: {n: {min: 1}, t: {regex: x.*}, c: [1, 2]}}\n"
        ),
        [],
        ["error", "latency", "dry_run", "rare http.route", "when a"],
    ),
    "unknown rule": (
        "error:\nslow:\n  quantile: 0.9\n",
        ["F:2: slow: unknown key; allowed: error, latency, rare, when, dry_run"],
        ["error"],
    ),
    "unknown key": (
        "error:\n\nlatency:\n  quantil: 0.9\n",
        ["F:4: latency.quantil: unknown key; allowed: quantile, factor, window, warmup"],
        ["error"],
    ),
    "wrong types": (
        (
            "error:\n  per_s: often\n  burst: [1]\nlatency: 0.99\ndry_run: 1\n"
            "rare: {attribute: 7}\nwhen: {name: a}\n"
        ),
        [
            "F:2: error.per_s: 'often'; allowed: a number from 0.001 to 1000000",
            "F:3: error.burst: a list; allowed: a number from 1 to 1000000",
            "F:4: latency: 0.99; allowed: a section with quantile, factor, window, warmup",
            "F:5: dry_run: 1; allowed: true or false",
            "F:6: rare.attribute: 7; allowed: the name of an attribute",
            "F:7: when: a section; allowed: a list of sections with name, operation, kind, attributes",
        ],
        [],
    ),
    "out of range": (
        (
            "latency:\n  quantile: 2\n  factor: .nan\n  window: 10.5\n  warmup: true\n"
            "rare:\n- attribute: a\n- attribute: b\n  share: 0\n"
        ),
        [
            f"F:2: latency.quantile: 2; allowed: a number from 0.001 to 1{DIGITS}",
            f"F:3: latency.factor: nan; allowed: a number from 0.001 to 1000000{DIGITS}",
            "F:4: latency.window: 10.5; allowed: a whole number from 1 to 100000",
            "F:5: latency.warmup: true; allowed: a whole number from 1 to 100000",
            "F:9: rare[1].share: 0; allowed: a number from 0.000001 to 1",
        ],
        [],
    ),
    "too fine": (
        "error:\nlatency:\n  quantile: 0.9995\n  factor: 1.0001\n",
        [
            f"F:3: latency.quantile: 0.9995; allowed: a number from 0.001 to 1{DIGITS}",
            f"F:4: latency.factor: 1.0001; allowed: a number from 0.001 to 1000000{DIGITS}",
        ],
        ["error"],
    ),
    "just so fine": ("latency: {quantile: 0.999, factor: 1.005}\n", [], ["latency"]),
    "do not go together": (
        "error:\nlatency:\n  window: 50\n",
        ["F:2: latency.warmup: 100; allowed: a whole number from 1 to the window, 50"],
        ["error"],
    ),
    "missing": (
        "error:\nrare:\n  share: 0.1\n",
        ["F:2: rare.attribute: nothing; allowed: the name of an attribute"],
        ["error"],
    ),
    "twice": (
        "error:\n  burst: 1\n  burst: 2\nlatency:\nerror:\n  burst: 3\n  per_s: 2\n",
        [
            "F:5: error: stands in line 1 already; the last one holds",
            "F:3: error.burst: stands in line 2 already; the last one holds",
        ],
        ["error", "latency"],
    ),
    "twice in a line": (
        "latency: {factor: 2, factor: 3}\n",
        ["F:1: latency.factor: stands in line 1 already; the last one holds"],
        ["latency"],
    ),
    "conditions": (
        (
            "error:\nwhen:\n- name: A\n  kind: servant\n  operation: 7\n  atributes: {}\n- kind: server\n"
            "  attributes:\n    a.b: {min: x}\n    404: {regex: '('}\n    c: {mini: 1}\n- name: all\n- 7\n"
            "- {name: x, attributes: 1}\n"
        ),
        [
            "F:6: when[0].atributes: unknown key; allowed: name, operation, kind, attributes",
            "F:3: when[0].name: 'A'; allowed: 1 to 27 characters of a-z 0-9 _ . -",
            "F:4: when[0].kind: 'servant'; allowed: internal, server, client, producer, consumer",
            "F:5: when[0].operation: 7; allowed: the name of a span",
            "F:7: when[1].name: nothing; allowed: 1 to 27 characters of a-z 0-9 _ . -",
            "F:9: when[1].attributes.a.b.min: 'x'; allowed: a number",
            (
                "F:10: when[1].attributes.404.regex: '('; allowed: a regular expression (missing ), "
                "unterminated subpattern at position 0)"
            ),
            (
                "F:11: when[1].attributes.c: a section with mini; allowed: a value, a list of values, or a"
                " section with min and max, or with regex"
            ),
            "F:12: when[2]: would fire for every span; give operation, kind or attributes",
            "F:13: when[3]: 7; allowed: a section with name, operation, kind, attributes",
            "F:14: when[4].attributes: 1; allowed: a section of attributes' names",
        ],
        ["error"],
    ),
    # A mistake behind an alias, or merged from one, is one where that is used.
    "aliases": (
        "error: &wild {burst: 0}\nlatency:\n  <<: *wild\n",
        [
            "F:1: error.burst: 0; allowed: a number from 1 to 1000000",
            "F:2: latency.burst: unknown key; allowed: quantile, factor, window, warmup",
        ],
        [],
    ),
}
"""Of these something can be read."""

DEFAULT = "; the default rules (error,latency) hold"
ALLOWED = "allowed: a section with error, latency, rare, when, dry_run"
BROKEN = {
    "empty": (b"", f"F: nothing; {ALLOWED}"),
    "a list": (b"\n- error\n", f"F:2: a list; {ALLOWED}"),
    "a text": (b"error\n", f"F:1: 'error'; {ALLOWED}"),
    "no YAML": (b"error:\n\tburst: 1\n", "F:2: no valid YAML: found character '\\t' that cannot"),
    "unclosed": (b"error:\nwhen: [\n", "F:3: no valid YAML: "),
    "no text": (b"error: \xff\n", "F: is no UTF-8 text: invalid start byte"),
    "a NUL": (b"error: \0\n", "F: no valid YAML: unacceptable character #x0000"),
    "a strange key": (b"? [a]\n: 1\n", "F:1: no valid YAML: found unhashable key"),
    "a strange tag": (
        b"error: !!python/name:os.system\n",
        "F:1: no valid YAML: could not determine",
    ),
    "no date": (b"error: 2020-99-99\n", "F: ValueError('month must be in 1..12'"),
    "deep": (b"[" * 100_000, "F: RecursionError("),
    "a circle": (b"&a [*a]\n", f"F:1: a list; {ALLOWED}"),
}
"""Of these nothing can: the default rules hold."""


@pytest.fixture(scope="module")
def told(
    python: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[str], list[str]]]:
    """Of each file what a process complains of, with F for its path, and which rules hold."""
    directory = tmp_path_factory.mktemp("rules")
    for name, (text, _, _) in FILES.items():
        (directory / name).write_text(text)
    for name, (data, _) in BROKEN.items():
        (directory / name).write_bytes(data)
    done = subprocess.run(
        [python, REPOSITORY / "tests/otel/programs.py", "rules", directory],
        env={**clean_environment(), "PYTHONPATH": str(REPOSITORY / "build/native/python")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {
        name: ([text.replace(str(directory / name), "F") for text in complaints], holds)
        for name, (complaints, holds) in json.loads(done.stdout).items()
    }


@pytest.mark.parametrize("name", FILES)
def test_each_mistake_is_told_by_line_and_key_and_costs_its_own_rule(
    name: str, told: dict[str, tuple[list[str], list[str]]]
) -> None:
    _, complaints, holds = FILES[name]
    assert told[name] == (complaints, holds)


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_says_nothing_leaves_the_default(
    name: str, told: dict[str, tuple[list[str], list[str]]]
) -> None:
    (complaint,), holds = told[name]
    assert complaint.startswith(f"BACKSIGHT_TRIGGERS_FILE: {BROKEN[name][1]}")
    assert complaint.endswith(DEFAULT)
    assert "\n" not in complaint
    assert holds == ["error", "latency"]
