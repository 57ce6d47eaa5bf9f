"""Builds HTML in which every text is escaped: only `Html` values pass as they are."""

import html
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from thinwire.errors import RunError

__all__ = ["Column", "Html", "details", "document", "el", "join", "save", "table"]

_VOID = frozenset({"br", "col", "meta"})


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def el(tag: str, attrs: Mapping[str, str] | None = None, *children: str) -> Html:
    """Return an element; children and attribute values are escaped unless they are `Html`."""
    head = "".join(f' {k}="{html.escape(v)}"' for k, v in (attrs or {}).items())
    if tag in _VOID:
        return Html(f"<{tag}{head}>")
    return Html(f"<{tag}{head}>{join(children)}</{tag}>")


def join(children: Iterable[str]) -> Html:
    """Return the children one after the other, escaped unless they are `Html`."""
    return Html(
        "".join(c if isinstance(c, Html) else html.escape(c, quote=False) for c in children)
    )


@dataclass(frozen=True, slots=True)
class Column:
    """A table column: its heading, whether it holds numbers, and what the heading means."""

    heading: str
    numeric: bool = True
    meaning: str = ""


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]], *, total: bool = False) -> Html:
    """Return a table that scrolls sideways on a narrow screen; `total` sets off the last row."""
    classes = [{"class": "num"} if c.numeric else {} for c in columns]
    head = [
        el("th", css | ({"title": c.meaning} if c.meaning else {}) | {"scope": "col"}, c.heading)
        for c, css in zip(columns, classes, strict=True)
    ]
    body = [
        el("tr", {}, *(el("td", css, cell) for css, cell in zip(classes, row, strict=True)))
        for row in rows
    ]
    css = {"class": "total"} if total else {}
    named = any(c.heading for c in columns)
    top = [el("thead", {}, el("tr", {}, *head))] if named else []
    inner = el("table", css, *top, el("tbody", {}, *body))
    return el("div", {"class": "scroll"}, inner)


def details(summary: str, *children: str, is_open: bool = False) -> Html:
    """Return a collapsible block."""
    attrs = {"open": ""} if is_open else {}
    return el("details", attrs, el("summary", {}, summary), *children)


def document(title: str, *body: str) -> Html:
    """Return the whole page with its style and script inside and nothing fetched from outside."""
    here = files("thinwire.report")
    style = Html((here / "page.css").read_text(encoding="utf-8"))
    script = Html((here / "page.js").read_text(encoding="utf-8"))
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    head = el(
        "head",
        {},
        el("meta", {"charset": "utf-8"}),
        el("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        el("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        el("title", {}, title),
        el("style", {}, style),
    )
    page = el("body", {}, el("main", {}, *body), el("script", {}, script))
    return Html(f"<!doctype html>\n{el('html', {'lang': 'en'}, head, page)}\n")


def save(out: Path, page: Html) -> Path:
    """Write a page, whole or not at all, and return its path.

    Raises:
        RunError: the file cannot be written.
    """
    part = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(page, encoding="utf-8")
        os.replace(part, out)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise RunError(f"cannot write the page {out}: {error.strerror}") from None
    return out
