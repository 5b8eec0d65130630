"""Sections as one HTML page: no script, no request to anywhere."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import Any

from common.telemetry.figures import draw, embed
from common.telemetry.format import number
from common.telemetry.sections import Area, Block, Cards, Lines, Picture, Section, Stack, Table, Text

WIDE_COLUMNS = 5
"""Tables of more columns take the whole width."""

_STYLE = """
:root { --ink: #27303b; --faint: #66717f; --line: #e1e6ec; --paper: #fff; --ground: #f3f5f8; --accent: #2f6db5; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main, header > div { max-width: 1240px; margin: 0 auto; padding: 0 28px; }
header { background: #1d2733; color: #fff; padding: 34px 0 64px; }
header h1 { margin: 0; font-size: 28px; line-height: 1.2; letter-spacing: -.01em; overflow-wrap: anywhere; }
header p { margin: 6px 0 0; color: #aebccb; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
  padding: 22px 26px; margin: 0 0 22px; }
section h2 { margin: 0 0 14px; font-size: 18px; }
main > .cards { margin: -40px 0 22px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(176px, 1fr)); gap: 14px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; }
.card .label { color: var(--faint); font-size: 13px; }
.card .value { font-size: 24px; font-weight: 650; letter-spacing: -.01em; line-height: 1.3; overflow-wrap: anywhere; }
.card .note { color: var(--faint); font-size: 12.5px; line-height: 1.35; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 18px 28px;
  align-items: start; }
figure { margin: 0; min-width: 0; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { font-weight: 650; margin-bottom: 6px; }
p.text { margin: 0 0 12px; max-width: 85ch; color: var(--faint); }
.tables { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 18px 28px; }
.wide { grid-column: 1 / -1; }
.table { overflow-x: auto; margin-bottom: 8px; min-width: 0; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
caption, summary { text-align: left; font-weight: 650; padding: 4px 0 6px; }
summary { cursor: pointer; color: var(--accent); }
th { text-align: left; font-weight: 600; color: var(--faint); border-bottom: 2px solid var(--line);
  padding: 5px 12px 5px 0; }
td { border-bottom: 1px solid var(--line); padding: 5px 12px 5px 0; overflow-wrap: anywhere; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
footer { color: var(--faint); font-size: 12.5px; padding: 2px 0 40px; }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""

_ICON = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    b'<path d="M1 14V9h3v5zm5 0V5h3v9zm5 0V1h3v13z" fill="#2f6db5"/></svg>'
)


def render_page(title: str, subtitle: str, headline: Cards, sections: Sequence[Section], footer: str) -> str:
    """The whole page as HTML text."""
    parts = [_block(headline)] + [_section(section) for section in sections]
    icon = base64.b64encode(_ICON).decode()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title>"
        f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">'
        f"<style>{_STYLE}</style></head><body>"
        f"<header><div><h1>{html.escape(title)}</h1><p>{html.escape(subtitle)}</p></div></header>"
        f"<main>{''.join(parts)}<footer>{html.escape(footer)}</footer></main></body></html>\n"
    )


def _section(section: Section) -> str:
    return f"<section><h2>{html.escape(section.title)}</h2>{_blocks(section.blocks)}</section>"


def _blocks(blocks: Sequence[Block]) -> str:
    """Neighbouring charts share a grid, and so do neighbouring tables."""
    parts: list[str] = []
    open_grid = ""
    for block in blocks:
        grid = "charts" if isinstance(block, (Lines, Stack, Area, Picture)) else ""
        grid = "tables" if isinstance(block, Table) else grid
        if grid != open_grid:
            parts.append(("</div>" if open_grid else "") + (f'<div class="{grid}">' if grid else ""))
            open_grid = grid
        parts.append(_block(block))
    return "".join(parts) + ("</div>" if open_grid else "")


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return f'<p class="text">{html.escape(block.text)}</p>'
    if isinstance(block, Cards):
        return f'<div class="cards">{"".join(_card(*card) for card in block.cards)}</div>'
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Picture):
        caption = f"<figcaption>{html.escape(block.title)}</figcaption>" if block.title else ""
        return f"<figure>{caption}{embed(block.svg)}</figure>"
    return f"<figure>{draw(block)}</figure>"


def _card(label: str, value: str, note: str) -> str:
    shown = f'<div class="note">{html.escape(note)}</div>' if note else ""
    return (
        f'<div class="card"><div class="label">{html.escape(label)}</div>'
        f'<div class="value">{html.escape(value)}</div>{shown}</div>'
    )


def _table(table: Table) -> str:
    right = [
        bool(table.rows) and all(isinstance(row[index], (int, float)) for row in table.rows)
        for index in range(len(table.columns))
    ]
    head = "".join(_cell("th", name, side) for name, side in zip(table.columns, right, strict=True))
    rows = "".join(
        f"<tr>{''.join(_cell('td', cell, side) for cell, side in zip(row, right, strict=True))}</tr>"
        for row in table.rows
    )
    body = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    if table.folded:
        return f'<details class="table wide"><summary>{html.escape(table.title)}</summary><table>{body}</details>'
    caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
    wide = " wide" if len(table.columns) > WIDE_COLUMNS else ""
    return f'<div class="table{wide}"><table>{caption}{body}</div>'


def _cell(tag: str, value: Any, right: bool) -> str:
    return f"<{tag}{' class=number' if right else ''}>{html.escape(number(value))}</{tag}>"
