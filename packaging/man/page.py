# SPDX-License-Identifier: Apache-2.0
"""Writes a manual page: of a program by its command line, or of a configuration file by its comments.

    page.py program NAME SECTION TEXT OUTPUT
    page.py file NAME SECTION YAML OUTPUT

TEXT has what no command line says, behind a line with its licence: lines that begin with
"# " are headings, an indented block belongs to the line before it, and empty lines part
paragraphs. Its first paragraph follows the synopsis. (man-pages(7), groff_man(7))
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from appliance.holder import argument_parser as holder_parser
from ctl.arguments import argument_parser as ctl_parser
from runtime import VERSION
from runtime.main import argument_parser as daemon_parser

_ROOT = Path(__file__).resolve().parents[2]

# Where a program's own words about itself are.
_MAIN = {
    "backsight-node": "appliance/__main__.py",
    "backsight-holder": "appliance/holder.py",
    "backsight-probes": "appliance/probes/program.py",
    "backsight-coordinator": "coordinator/__main__.py",
    "backsightctl": "ctl/__main__.py",
}

# "#", two blanks for each level that it is deep in, a key, its default. A text has one blank.
_KEY = re.compile(r"#((?:  )*)([a-z_]+):(?: (.*))?")


def escaped(text: str) -> str:
    """As it is to be read: no request of roff, and no dash that is typeset as another character."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("^", "\\(ha").replace("~", "\\(ti")
    # Or a request takes it for the bounds of an argument.
    text = text.replace('"', "\\(dq")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def _tagged(tag: str, text: str) -> Iterator[str]:
    yield ".TP"
    yield f".B {escaped(tag)}"
    yield escaped(text)


def _title(name: str, section: str, what: str) -> Iterator[str]:
    yield f'.TH {escaped(name)} {section} "" "Backsight {VERSION}"'
    yield ".nh"
    yield ".SH NAME"
    yield f"{escaped(name)} \\- {escaped(what)}"


# -------------------------------------------------------------------- programs


def description_of(program: str) -> str:
    """The first line of what its main module says of itself."""
    text = ast.get_docstring(ast.parse((_ROOT / _MAIN[program]).read_text("utf-8")))
    assert text is not None
    return text.splitlines()[0]


def _synopsis(parser: argparse.ArgumentParser) -> str:
    usage = parser.format_usage().removeprefix("usage: ")
    return " ".join(usage.split()).replace("[-h] ", "")


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            continue
        name = action.metavar or action.dest
        argument = "" if action.nargs == 0 else f" {name}"
        if action.choices and not action.metavar:
            argument = f" {'|'.join(action.choices)}"
        tag = ", ".join(f"{option}{argument}" for option in action.option_strings) or str(name)
        choices = ", ".join(map(str, action.choices or ()))
        text = (action.help or "") % {**vars(action), "choices": choices, "prog": parser.prog}
        if isinstance(action, argparse._VersionAction):
            text = "say which version it is, and end"
        yield from _tagged(tag, text)


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Those without further ones below them."""
    below = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    for action in below:
        for command in action.choices.values():
            yield from commands_of(command)
    if not below:
        yield parser


def text_parts(text: str) -> tuple[list[str], list[str]]:
    """What comes before the first heading, and the rest, as roff."""
    lead: list[str] = []
    rest: list[str] = []
    into = lead
    lines = text.splitlines()
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if line.startswith("# "):
            into = rest
            into.append(f".SH {escaped(line[2:])}")
        elif not line:
            into.append(".PP")
        elif line.startswith("    "):
            into.append(escaped(line.strip()))
        elif following.startswith("    "):
            into += [".TP", f".B {escaped(line)}"]
        else:
            into.append(escaped(line))
    return lead, rest


def _parser(program: str, said: str) -> argparse.ArgumentParser:
    if program == "backsightctl":
        return ctl_parser(said)
    return (holder_parser if program == "backsight-holder" else daemon_parser)(program, said)


def _program_page(name: str, section: str, text: Path) -> Iterator[str]:
    said = description_of(name)
    parser = _parser(name, said)
    _licence, _, words = text.read_text("utf-8").partition("\n")
    lead, rest = text_parts(words.strip())
    yield from _title(name, section, said.partition(": ")[2].rstrip("."))
    yield ".SH SYNOPSIS"
    yield f".B {escaped(_synopsis(parser))}"
    yield ".SH DESCRIPTION"
    yield from lead
    yield ".SH OPTIONS"
    yield from _options(parser)
    commands = list(commands_of(parser))
    if commands != [parser]:
        yield ".SH COMMANDS"
        for command in commands:
            yield f".SS {escaped(_synopsis(command).removeprefix(f'{parser.prog} '))}"
            yield escaped(f"{command.description}.")
            yield from _options(command)
    yield from rest


# ---------------------------------------------------------------------- files


def file_page(name: str, section: str, example: Path) -> Iterator[str]:
    """A commented example in which all keys stand, none of them in force."""
    first, *blocks = example.read_text("utf-8").strip().split("\n\n")
    what, *about = _paragraphs(first.splitlines()[2:])
    yield from _title(name, section, what.partition(": ")[2].rstrip("."))
    yield ".SH DESCRIPTION"
    for paragraph in about:
        yield escaped(paragraph)
        yield ".PP"
    path: list[str] = []
    for block in blocks:
        said: list[str] = []
        for line in block.splitlines():
            key = _KEY.fullmatch(line)
            heading = re.fullmatch(r"# -+ (.*)", line)
            if heading:
                yield f".SH {escaped(heading[1].upper())}"
            elif key:
                path[len(key[1]) // 2 :] = [key[2]]
                yield from _tagged(
                    ".".join(path) + (f": {key[3]}" if key[3] else ""), " ".join(said)
                )
                said = []
            else:
                said.append(line.removeprefix("#").strip())


def _paragraphs(lines: list[str]) -> list[str]:
    text = "\n".join(line.removeprefix("#").strip() for line in lines)
    return [paragraph.replace("\n", " ") for paragraph in text.split("\n\n")]


_PAGES: dict[str, Callable[[str, str, Path], Iterator[str]]] = {
    "program": _program_page,
    "file": file_page,
}


def main(arguments: list[str]) -> int:
    """Write one page."""
    kind, name, section, source, output = arguments
    lines = _PAGES[kind](name, section, Path(source))
    Path(output).write_text(
        '.\\" Made by packaging/man/page.py\n' + "\n".join(lines) + "\n", "utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
