"""One HTML page with all that it needs: no scripts, no network access, light or dark as its surroundings are."""

from html import escape
from string import Template

# In light and in dark surroundings.
_COLORS = {
    "ink": "light-dark(#202124, #e8eaed)",
    "soft": "light-dark(#5f6368, #9aa0a6)",
    "paper": "light-dark(#fff, #18191b)",
    "rule": "light-dark(#dadce0, #3c4043)",
    "shade": "light-dark(#f1f3f4, #26282b)",
    "tint": "light-dark(#e8f0fe, #1f2a3d)",
    "bad": "light-dark(#d93025, #f28b82)",
    "first": "light-dark(#1a73e8, #8ab4f8)",
    "second": "light-dark(#e8710a, #fcad70)",
}
_DOCUMENT = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
$style
</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
""")
_STYLE = """\
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: $paper;
  color: $ink; font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; }
h2 { font-size: 1.15rem; margin: 1.5rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 0; }
p { margin: 0.25rem 0; }
footer, .soft { color: $soft; }
pre { background: $shade; padding: 0.5rem 0.75rem; margin: 0.4rem 0; overflow-x: auto; }
li { margin: 0 0 1.2rem; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; }
svg text { fill: $soft; }
.grid { stroke: $rule; }
.figure { overflow-x: auto; }
.figure svg { min-width: 46rem; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th { position: sticky; top: 0; background: $paper; }
th, td { padding: 0.25rem 0.8rem 0.25rem 0; text-align: right; border-bottom: 1px solid $rule; }
footer { font-size: 0.85rem; margin-top: 2rem; }"""


def document(title: str, body: str, style: str = "") -> str:
    """Returns a whole page.

    Args:
      title: also its heading; it is escaped here.
      body: HTML.
      style: CSS beside what all pages have, in which `$ink`, `$soft`, `$paper`, `$rule`, `$shade`, `$tint`, `$bad`,
        `$first` and `$second` stand for colors.

    Example:
      >>> "<h1>a &lt; b</h1>" in document("a < b", "<p>text</p>")
      True
    """
    colored = Template(f"{_STYLE}\n{style}".strip()).substitute(_COLORS)
    return _DOCUMENT.substitute(title=escape(title), style=colored, body=body)


def code_block(code: str, name: str = "") -> str:
    """Returns code to be copied; nothing if there is none.

    Args:
      code: as it is; it is escaped here.
      name: its id; none if it is empty.

    Example:
      >>> code_block("a < b")
      '<pre><code>a &lt; b</code></pre>'
    """
    named = f' id="{escape(name)}"' if name else ""
    return f"<pre><code{named}>{escape(code)}</code></pre>" if code else ""
