"""Records a command in a terminal of its own, and draws a screen of it as SVG."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from fcntl import ioctl
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

WIDTH, HEIGHT = 100, 40
_CONTROL = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\r|\n")
_QUIET_S = 0.05
"""Without output for this long, a screen is complete."""
# As rich's, but no font is loaded from elsewhere.
_SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}"
 xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
 font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class Screen:
    """The lines that a program's output leaves, with their colours.

    It knows what rich writes: new lines, the cursor one or more lines up, an erased line.
    """

    def __init__(self) -> None:
        self._lines, self._row = [""], 0

    def take(self, output: str) -> None:
        """Process some output."""
        start = 0
        for found in _CONTROL.finditer(output):
            self._lines[self._row] += output[start : found.start()]
            start = found.end()
            if found[0] == "\n":
                self._row += 1
                if self._row == len(self._lines):
                    self._lines.append("")
            elif found[2] == "m":
                self._lines[self._row] += found[0]
            elif found[2] == "A":
                self._row -= int(found[1] or 1)
            elif found[2] == "K":
                self._lines[self._row] = ""
        self._lines[self._row] += output[start:]

    def text(self) -> str:
        """The lines up to the last that is not empty."""
        return "\n".join(self._lines).rstrip()


def screens(
    command: Sequence[str], environment: Mapping[str, str], keep: Callable[[str], bool]
) -> list[str]:
    """Run a command in a terminal; the screens that `keep` wants, and the last.

    Raises CalledProcessError if the command fails.
    """
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    terminal = dict(environment) | {"TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    with subprocess.Popen(
        command, env=terminal, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        screen, kept, pending = Screen(), [""], b""
        while True:
            if pending and not select.select([ours], [], [], _QUIET_S)[0]:
                screen.take(pending.decode(errors="replace"))
                pending = b""
                if keep(screen.text()):
                    kept.append(screen.text())
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                part = b""
            if not part:
                break
            pending += part
        screen.take(pending.decode(errors="replace"))
    os.close(ours)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, screen.text())
    return [*kept[1:], screen.text()]


def save_svg(screen: str, title: str, path: Path) -> None:
    """Draw a screen."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen), soft_wrap=False)
    drawn = console.export_svg(
        title=title, theme=DIMMED_MONOKAI, code_format=_SVG, unique_id="terminal"
    )
    path.write_text(drawn)
