# SPDX-License-Identifier: Apache-2.0
"""Writes what completes the command line of ``backsightctl`` in bash: bash.py OUTPUT.

A table from what was said so far to what may follow, made of the parser. (shtab of Debian 12
offers the first of several choices only.)
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from ctl.arguments import argument_parser

_SCRIPT = """\
# Made by packaging/completion/bash.py
_backsightctl_words() {
	case "$1" in
%s
	esac
}
_backsightctl() {
	local word=${COMP_WORDS[COMP_CWORD]} said='' found offered=()
	local i
	for ((i = 1; i < COMP_CWORD; i++)); do
		case "$(_backsightctl_words "$said:commands")" in
		*" ${COMP_WORDS[i]} "*) said="$said ${COMP_WORDS[i]}" ;;
		esac
	done
	if found=$(_backsightctl_words "$said:${COMP_WORDS[COMP_CWORD - 1]}") && [ -n "$found" ]; then
		:
	elif [[ $word == -* ]]; then
		found=$(_backsightctl_words "$said:options")
	else
		found="$(_backsightctl_words "$said:commands")$(_backsightctl_words "$said:argument")"
	fi
	case "$found" in
	FILE) mapfile -t offered < <(compgen -f -- "$word") ;;
	VALUE) ;;
	*) mapfile -t offered < <(compgen -W "$found" -- "$word") ;;
	esac
	COMPREPLY=("${offered[@]}")
}
complete -o filenames -F _backsightctl backsightctl
"""


def _value(action: argparse.Action) -> str:
    """What may follow an option, or stand for an argument."""
    if action.choices:
        return " ".join(map(str, action.choices))
    return "FILE" if action.type is Path else "VALUE"


def _table(parser: argparse.ArgumentParser, said: str = "") -> Iterator[tuple[str, str]]:
    """What was said, and the words that may follow."""
    options: list[str] = []
    for action in parser._actions:
        options += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            yield f"{said}:commands", f" {' '.join(action.choices)} "
            for name, below in action.choices.items():
                yield from _table(below, f"{said} {name}")
        elif not action.option_strings:
            yield f"{said}:argument", _value(action)
        elif action.nargs != 0:
            for option in action.option_strings:
                yield f"{said}:{option}", _value(action)
    yield f"{said}:options", " ".join(options)


def main() -> int:
    """Write it."""
    lines = (
        f"\t{shlex.quote(said)}) echo {shlex.quote(words)} ;;"
        for said, words in _table(argument_parser(""))
    )
    Path(sys.argv[1]).write_text(_SCRIPT % "\n".join(lines), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
