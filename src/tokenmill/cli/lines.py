"""What a person types: with line editing on a terminal, line by line from anything else."""

from __future__ import annotations

import sys

QUOTE = '"""'


class LineReader:
    """Reads entries. A paste of several lines is one entry on a terminal, and so is what stands between two `\"\"\"`."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._edits = self.is_terminal and sys.stdout.isatty()
        if self._edits:
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")
        # What is not UTF-8 is refused later, where its place in the text is told.
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]

    def read(self) -> str:
        """The next entry. Raises EOFError at the end of the input."""
        entry = self._line(">>> ")
        if not entry.startswith(QUOTE):
            return entry
        entry = entry.removeprefix(QUOTE)
        while not entry.endswith(QUOTE):
            entry += "\n" + self._line("... ")
        return entry.removesuffix(QUOTE)

    def _line(self, prompt: str) -> str:
        if self._edits:
            return input(prompt)
        if self.is_terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")
