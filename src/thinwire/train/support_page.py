"""docs/support.md, and what `thinwire recipes --support` prints: `support`'s table in words."""

from itertools import combinations

from thinwire.errors import ConfigError
from thinwire.train.axes import AXES, check_ranks
from thinwire.train.config import Config
from thinwire.train.recipes import RECIPES
from thinwire.train.support import METHODS, asked_for, exclusive, refusal

__all__ = ["fewest_ranks", "support_page"]

_MOST_RANKS = 16

_HEAD = """\
# What goes together

Written by `thinwire recipes --support`; a test compares this page with the code. Each pair and
triple that is said to go together is trained for a few steps beside its dense twin by the test
suite; each other one is refused before any rank starts, in one line with the reason below.

| method | what it does | setting | mesh axis |
|---|---|---|---|
"""

_PAIRS_HEAD = """
A method shrinks the traffic of its axis, which needs two ranks or more: two methods on two axes
take four ranks, three take eight. Single settings of two methods may exclude each other though the
methods don't; those are refused at set-up too.

## Pairs

A number refers to the reasons below the table; a dash marks values of one setting.

"""


def support_page() -> str:
    """Return the page, Markdown."""
    lines = [f"| {m.key} | {m.does} | `{m.setting}` {', '.join(m.values)} | {_axis(m.axis)} |"
             for m in METHODS.values()]  # fmt: skip
    return _HEAD + "\n".join(lines) + "\n" + _PAIRS_HEAD + _pairs() + _triples() + _recipes()


def fewest_ranks(config: Config) -> tuple[int, dict[str, int]]:
    """Return the fewest ranks on which all methods have traffic to shrink, and the axes then.

    Raises:
        ConfigError: there are none up to 16.
    """
    for ranks in range(2, _MOST_RANKS + 1):
        try:
            return ranks, check_ranks(config, ranks)
        except ConfigError as error:
            last = error
    raise last


def _axis(axis: str) -> str:
    return f"`{axis}`" if axis else "none"


def _pairs() -> str:
    keys, reasons = list(METHODS), _reasons()
    lines = [f"| | {' | '.join(keys[1:])} |", f"|---|{'---|' * (len(keys) - 1)}"]
    for i, row in enumerate(keys[:-1]):
        cells = ["" if j <= i else _cell(row, keys[j], reasons) for j in range(1, len(keys))]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"{number}. {reason}." for number, reason in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n"


def _reasons() -> list[str]:
    found = (refusal(pair) for pair in combinations(METHODS, 2) if not exclusive(pair))
    return list(dict.fromkeys(reason for _, reason in filter(None, found)))


def _cell(row: str, column: str, reasons: list[str]) -> str:
    if exclusive((row, column)):
        return "–"
    found = refusal((row, column))
    return "yes" if found is None else str(1 + reasons.index(found[1]))


def _triples() -> str:
    triples = [t for t in combinations(METHODS, 3) if not exclusive(t)]
    together = [t for t in triples if refusal(t) is None]
    own: dict[str, list[str]] = {}
    for triple in triples:
        found = refusal(triple)
        if found is not None and len(found[0]) > 2:
            own.setdefault(found[1], []).append(" + ".join(triple))
    lines = [
        "",
        "## Triples",
        "",
        f"Three methods go together where each two of them do ({len(together)} triples), except:",
        "",
        *(f"- {'; '.join(named)}: {reason}." for reason, named in own.items()),
        "",
        "Boundaries (constrained or lossy) go with sparseloco by way of `mesh.replicas`: "
        '`--mesh.replicas "0,1:8 2,3:8"` is two pipelines of two stages.',
        "",
    ]
    return "\n".join(lines)


def _recipes() -> str:
    lines = [
        "",
        "## Recipes of several methods",
        "",
        "| recipe | methods | ranks from | axes then |",
        "|---|---|---|---|",
    ]
    for name, make in RECIPES.items():
        config = make()
        methods = asked_for(config)
        if len(methods) < 2:
            continue
        ranks, sizes = fewest_ranks(config)
        axes = config.mesh.replicas and f'replicas "{config.mesh.replicas}"'
        axes = axes or " x ".join(f"{a} {sizes[a]}" for a in AXES if sizes[a] > 1)
        lines.append(f"| `{name}` | {', '.join(methods)} | {ranks} | {axes} |")
    return "\n".join(lines) + "\n"
