"""The colors of a plan's pictures, and what they mean."""

from collections.abc import Iterable
from html import escape

# Light and dark, of hues that stay apart; policies have them in this order.
_SERIES = (
    ("#1a73e8", "#8ab4f8"),
    ("#e8710a", "#fcad70"),
    ("#188038", "#81c995"),
    ("#9334e6", "#c58af9"),
    ("#d01884", "#ff8bcb"),
    ("#00838f", "#78d9ec"),
    ("#a57c00", "#fdd663"),
    ("#5f6368", "#bdc1c6"),
)
# The state, what the batch brings, what the step makes; then what is not in use.
_KINDS = {
    "parameters": ("#1a73e8", "#8ab4f8"),
    "optimizer state": ("#174ea6", "#4f7fd6"),
    "model state": ("#00838f", "#78d9ec"),
    "batch": ("#80868b", "#bdc1c6"),
    "other arguments": ("#3c4043", "#9aa0a6"),
    "constants": ("#795548", "#bcaaa4"),
    "copies of parameters": ("#9334e6", "#c58af9"),
    "activations saved for the backward pass": ("#e8710a", "#fcad70"),
    "gradients": ("#188038", "#81c995"),
    "temporaries": ("#f9ab00", "#fdd663"),
    "workspaces": ("#d01884", "#ff8bcb"),
    "results": ("#5bb974", "#b7e1c1"),
    "kept for other moments": ("#dadce0", "#4a4e54"),
    "padding": ("#c58b6b", "#8a6a58"),
}
_OTHER_KIND = ("#202124", "#e8eaed")


def _rules(prefix: str, colors: Iterable[tuple[str, str]]) -> str:
    return "\n".join(
        f".{prefix}{i} {{ --color: light-dark({light}, {dark}); }}" for i, (light, dark) in enumerate(colors)
    )


STYLE = f"""\
{_rules("series", _SERIES)}
{_rules("kind", (*_KINDS.values(), _OTHER_KIND))}
[class^="series"], [class^="kind"] {{ fill: var(--color); stroke: var(--color); }}
rect[class^="kind"] {{ stroke: $paper; stroke-width: 0.5; }}
.key {{ display: inline-block; width: 0.75em; height: 0.75em; background: var(--color); }}
.legend {{ display: flex; flex-wrap: wrap; gap: 0 1.2rem; font-size: 0.85rem; }}"""
"""Of the colors; in light and in dark surroundings."""


def kind_order(kind: str) -> int:
    """Returns where a kind of memory comes in bars and which color it has.

    Args:
      kind: as that of `Buffer`.
    """
    return list(_KINDS).index(kind) if kind in _KINDS else len(_KINDS)


def kind_class(kind: str) -> str:
    """Returns the class of a kind of memory, which gives it its color.

    Args:
      kind: as that of `Buffer`.
    """
    return f"kind{kind_order(kind)}"


def series_classes(names: Iterable[str]) -> dict[str, str]:
    """Returns the classes of policies, which give them their colors.

    Args:
      names: of the policies, each as often as it comes.

    Example:
      >>> series_classes(["float32", "mixed_float16", "float32"])
      {'float32': 'series0', 'mixed_float16': 'series1'}
    """
    return {name: f"series{i % len(_SERIES)}" for i, name in enumerate(dict.fromkeys(names))}


def legend(classes: dict[str, str]) -> str:
    """Returns what the colors mean, as HTML.

    Args:
      classes: by name.
    """
    keys = (f'<span><span class="{name} key"></span> {escape(text)}</span>' for text, name in classes.items())
    return f'<p class="legend">{"".join(keys)}</p>'
