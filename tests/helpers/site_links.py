"""Links of a built site: which of them lead to a page, an anchor or a file that is not there."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ADDRESSES = ("href", "src", "data", "poster", "srcset")


class _Page(HTMLParser):
    """Collects the anchors of a page, and the addresses that it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what a tag names and where it leads."""
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in ADDRESSES and value:
                self.addresses.append(value)


def broken_links(site: Path) -> list[str]:
    """Returns the links of a site that lead nowhere in it, each as "page: address".

    Other sites are not asked; `make linkcheck` does that.

    Args:
      site: the folder of the built site; what is in its `_static` are no pages but files of the theme.
    """
    files = [path for path in sorted(site.resolve().rglob("*.html")) if "_static" not in path.parts]
    pages = {path: _Page(path.read_text()) for path in files}
    return [
        f"{path.relative_to(site.resolve())}: {address}"
        for path, page in pages.items()
        for address in dict.fromkeys(page.addresses)
        if not _resolves(address, path, pages)
    ]


def _resolves(address: str, origin: Path, pages: dict[Path, _Page]) -> bool:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return True
    target = (origin.parent / unquote(parts.path)).resolve() if parts.path else origin
    if not parts.fragment or target not in pages:
        return target.is_file()
    return unquote(parts.fragment) in pages[target].anchors
