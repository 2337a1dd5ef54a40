"""Self-contained HTML pages in the browser's theme: reports of runs, rejected data, exports."""

from __future__ import annotations

from html import escape

from trainwright.tasks.plots import colours

STYLE = (
    colours.STYLE
    + """
body { margin: 0 auto; max-width: 1040px; padding: 32px 24px 64px; color: var(--text);
  background: var(--card); font: 15px/1.5 system-ui, sans-serif; }
a { color: var(--accent); }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 40px 0 10px; }
p { color: var(--muted); margin: 4px 0 12px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr));
  gap: 12px; margin-top: 20px; }
.tile { background: var(--back); border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 20px; }
.tile span { color: var(--muted); font-size: 12px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: 14px; }
th { text-align: left; color: var(--muted); font-weight: 500; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); }
td.figure, th.figure { text-align: right; }
.good { color: var(--good); } .bad { color: var(--bad); }
.wide { overflow-x: auto; } .wide.chart { margin-top: 16px; }
.verdict { color: inherit; font-weight: 600; margin: 8px 0; padding-left: 10px;
  border-left: 4px solid var(--muted); }
.verdict.good { border-color: var(--good); } .verdict.bad { border-color: var(--bad); }
summary { color: var(--muted); cursor: pointer; margin: 8px 0; }
svg { max-width: 100%; display: block; margin: 4px 0 18px; }
table.confusion { width: auto; } .confusion td { padding: 3px 8px; text-align: right; }
"""
)


def html_page(title: str, body: str, head: str = "") -> str:
    """A page. `body` and `head` are HTML; `title` is text."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>{head}</head>"
        f"<body>{body}</body></html>\n"
    )


def tiles(values: list[tuple[str, str]]) -> str:
    """Large values, each below the text that says what it is. Values are HTML."""
    shown = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{value}</b></div>'
        for value, name in values
    )
    return f'<div class="tiles">{shown}</div>'


def table(columns: list[str], rows: list[list[str]], figures: set[int]) -> str:
    """An HTML table. Cells are HTML; `figures` are the right-aligned columns."""

    def cells(tag: str, row: list[str]) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        marks = [
            scope + (' class="figure"' if number in figures else "") for number in range(len(row))
        ]
        return "".join(
            f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in zip(marks, row, strict=True)
        )

    head = f"<tr>{cells('th', columns)}</tr>"
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide" tabindex="0"><table>{head}{body}</table></div>'
