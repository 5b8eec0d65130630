"""What a report is made of: sections of blocks, plain data that goes to JSON and back, so that a report can be rebuilt.

Section("Length exchange", [
    Text("Tokens of the busiest rank over the mean, before and after."),
    Lines("imbalance", "step", "max / mean", [Series("before", steps, a), Series("after", steps, b)]),
])
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.telemetry.log import encode


@dataclass
class Text:
    """A paragraph of plain text."""

    text: str


@dataclass
class Cards:
    """Headline numbers. cards: (label, value, note) strings; the note may be empty."""

    cards: list[tuple[str, str, str]]


@dataclass
class Table:
    """A table. rows: as many cells as columns; numbers are set to the right. folded: shown on a click."""

    columns: list[str]
    rows: list[list[Any]]
    title: str = ""
    folded: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}: row {row!r} has {len(row)} cells for {len(self.columns)} columns"
                )


@dataclass
class Series:
    """One line of a chart. smooth: faint, under its running mean. marked: with points. right: on the right axis."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    smooth: bool = False
    marked: bool = False
    right: bool = False

    def __post_init__(self) -> None:
        self.x, self.y = [[float(value) for value in values] for values in (self.x, self.y)]
        if len(self.x) != len(self.y):
            raise ValueError(f"series {self.name!r} has {len(self.x)} x and {len(self.y)} y")


@dataclass
class Lines:
    """A line chart. target: a dashed level with its label; right_label: axis of the series that ask for it."""

    title: str
    x_label: str
    y_label: str
    series: list[Series]
    log_y: bool = False
    right_label: str = ""
    target: tuple[float, str] | None = None
    percent: bool = False


@dataclass
class Stack:
    """Bars of parts on each other. labels: [bars]; parts: name -> [bars]. horizontal: one bar per line."""

    title: str
    value_label: str
    labels: list[str]
    parts: dict[str, list[float]]
    horizontal: bool = True
    reference: tuple[float, str] | None = None

    def __post_init__(self) -> None:
        self.parts = {name: [float(value) for value in values] for name, values in self.parts.items()}
        _check_parts(self.title, self.parts, len(self.labels))


@dataclass
class Area:
    """Parts on each other along x. parts: name -> [points]."""

    title: str
    x_label: str
    y_label: str
    x: list[float]
    parts: dict[str, list[float]]

    def __post_init__(self) -> None:
        self.parts = {name: [float(value) for value in values] for name, values in self.parts.items()}
        _check_parts(self.title, self.parts, len(self.x))


@dataclass
class Picture:
    """A drawing as SVG text, e.g. from `Picture.of(figure)` with a matplotlib figure."""

    svg: str
    title: str = ""

    def __post_init__(self) -> None:
        if "<svg" not in self.svg:
            raise ValueError(f"picture {self.title!r} holds no <svg> element; make it with Picture.of(figure)")

    @classmethod
    def of(cls, figure: Any, title: str = "") -> Picture:
        """A matplotlib figure."""
        text = io.StringIO()
        figure.savefig(text, format="svg")
        return cls(text.getvalue(), title)


Block = Text | Cards | Table | Lines | Stack | Area | Picture


@dataclass
class Section:
    """A titled part of a report. Charts stand two in a row where the window is wide enough."""

    title: str
    blocks: list[Block] = field(default_factory=list)


def _check_parts(title: str, parts: dict[str, list[float]], size: int) -> None:
    for name, values in parts.items():
        if len(values) != size:
            raise ValueError(f"chart {title!r}: part {name!r} has {len(values)} values for {size} places")


_BLOCKS = {cls.__name__.lower(): cls for cls in (Text, Cards, Table, Lines, Stack, Area, Picture)}


def to_json(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Sections as JSON values. Raises ValueError for what is no section or block."""
    result = []
    for section in sections:
        if not isinstance(section, Section):
            raise ValueError(f"{section!r} is no Section; write Section(title, [blocks])")
        for block in section.blocks:
            if not isinstance(block, Block):
                raise ValueError(f"{block!r} in section {section.title!r} is no block; use {', '.join(_BLOCKS)}")
        blocks = [{"type": type(block).__name__.lower(), **encode(block)} for block in section.blocks]
        result.append({"title": section.title, "blocks": blocks})
    return result


def from_json(values: Sequence[dict[str, Any]]) -> list[Section]:
    """The sections that `to_json` wrote. Raises ValueError for a block of an unknown type."""
    sections = []
    for value in values:
        blocks: list[Block] = []
        for fields in value["blocks"]:
            fields = dict(fields)
            kind = fields.pop("type", None)
            if kind not in _BLOCKS:
                raise ValueError(f"section {value['title']!r} holds a block of unknown type {kind!r}")
            if kind == "lines":
                fields["series"] = [Series(**series) for series in fields["series"]]
            names = {item.name for item in dataclasses.fields(_BLOCKS[kind])}
            blocks.append(_BLOCKS[kind](**{name: item for name, item in fields.items() if name in names}))
        sections.append(Section(value["title"], blocks))
    return sections
