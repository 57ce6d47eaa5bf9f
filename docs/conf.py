"""The documentation site: `make docs`. The build fails on a warning and on an undocumented name."""

import importlib
import inspect
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

import thinwire

project = "thinwire"
author = "the thinwire developers"
copyright = "the thinwire developers, Apache-2.0"
release = version = thinwire.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"thinwire {release}"
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": False}

# What users import: every name in these modules' `__all__` must stand in the API pages.
PUBLIC = (
    "aquavit", "codecs", "comm", "eco", "errors", "pipeline", "replicas", "scape", "schedules",
    "sparseloco", "taco",
)  # fmt: skip


def check_public_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Raise for a public name without docstring, or that no API page describes."""
    described = set(env.domains["py"].objects)  # type: ignore[attr-defined]
    missing = []
    for package in PUBLIC:
        module = importlib.import_module(f"thinwire.{package}")
        for name in module.__all__:
            value = getattr(module, name)
            full = f"thinwire.{package}.{name}"
            if full not in described:
                missing.append(f"{full} stands in no API page")
            elif (inspect.isclass(value) or inspect.isroutine(value)) and not own_doc(value):
                missing.append(f"{full} has no docstring")
    if missing:
        raise ExtensionError("undocumented public names: " + "; ".join(missing))


def own_doc(value: Any) -> str | None:
    """Return the docstring, unless it is the one that a dataclass makes up."""
    doc = value.__doc__
    return None if doc and doc.startswith(f"{value.__name__}(") else doc


def as_plain_text(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Escape the bars of |x| and the star of *x, marks to Sphinx: docstrings are plain text."""
    for i, line in enumerate(lines):
        if ">>>" not in line:
            lines[i] = re.sub(r"(?<![\w`*])\*(?=[\w.])", r"\\*", line.replace("|", r"\|"))


def setup(app: Sphinx) -> None:
    """Connect the two to the build, as Sphinx asks for it."""
    app.connect("autodoc-process-docstring", as_plain_text, priority=400)  # before napoleon
    app.connect("env-check-consistency", check_public_names)
