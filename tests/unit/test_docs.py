"""The documentation's own check: a public name must stand in the API pages, with a docstring."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sphinx")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def conf():
    spec = importlib.util.spec_from_file_location("docs_conf", DOCS / "conf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_name_outside_the_pages_ends_the_build(conf, monkeypatch):
    monkeypatch.setattr(conf, "PUBLIC", ("errors",))
    names = importlib.import_module("thinwire.errors").__all__
    objects = {f"thinwire.errors.{n}": None for n in names if n != "WireError"}
    env = SimpleNamespace(domains={"py": SimpleNamespace(objects=objects)})
    with pytest.raises(Exception, match=r"errors\.WireError stands in no API page"):
        conf.check_public_names(None, env)
    objects["thinwire.errors.WireError"] = None
    conf.check_public_names(None, env)


def test_a_dataclass_without_docstring_is_seen(conf):
    @dataclass
    class Bare:
        x: int

    assert Bare.__doc__ == "Bare(x: int)"
    assert conf.own_doc(Bare) is None


def test_every_public_package_has_a_page(conf):
    import thinwire

    packages = {n for n in thinwire.__all__ if n[0].islower()}
    assert packages == set(conf.PUBLIC)
    for name in packages:
        assert f"automodule:: thinwire.{name}" in (DOCS / "api" / f"{name}.md").read_text()
