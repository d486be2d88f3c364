"""The site: every public name once in its reference, every page built, looked at in a browser."""

import ast
import html
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from browsing import open_browser, show
from documented_names import documented_names
from process_helpers import run_python
from selenium import webdriver
from selenium.webdriver.common.by import By
from site_links import broken_links

import jmp_train as jt
import jmp_train.graphs
import jmp_train.policies

pytestmark = pytest.mark.quick

DOCS = Path(__file__).parents[2] / "docs"
INTERFACES = (
    *(jt, jmp_train.policies, jmp_train.graphs, jt.tools, jt.steps, jt.parallel, jt.checkpoints, jt.distributed),
    *(jt.data, jt.aot, jt.planning, jt.tuning, jt.capsules),
)
NOT_SHOWN = {"PyTree"}  # any tree: a name for readers of signatures
GENERATED = ("genindex", "search")
TUTORIALS = sorted(path.stem for path in (DOCS / "tutorials").glob("*.md"))


def missing_names(folder: Path) -> set[str]:
    """Returns the public names that the pages in a folder lack."""
    return {name for module in INTERFACES for name in _names(module)} - documented_names(folder).keys() - NOT_SHOWN


def _names(module: ModuleType) -> Iterator[str]:
    yield from getattr(module, "__all__", ()) or (
        name for name in dir(module) if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    )


def test_the_reference_has_every_public_name_and_no_other() -> None:
    assert missing_names(DOCS / "api") == set()
    public = {f"{module.__name__}.{name}" for module in INTERFACES for name in _names(module)}
    listed = {full for name, full in documented_names(DOCS / "api").items() if not name.startswith("fn.")}
    assert listed - public == set()


def test_examples_use_public_names() -> None:
    """And data sets, which examples name by module."""
    allowed = documented_names(DOCS / "api").keys() | {"graphs", "fn"}
    for path in (DOCS.parent / "examples").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and re.match(r"jmp_train(?!\.graphs\.datasets)", node.module or ""):
                assert {alias.name for alias in node.names} <= allowed, path


@pytest.fixture(name="site", scope="module")
def fixture_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site without its notebooks run, which have a test each."""
    folder = tmp_path_factory.mktemp("site")
    settings = ("-W", "--keep-going", "-D", "nb_execution_mode=off", "-D", "suppress_warnings=myst-nb.lexer")
    run_python("-m", "sphinx", "-b", "html", "-q", *settings, DOCS, folder, timeout=550)
    return folder


@pytest.fixture(name="browser", scope="module")
def fixture_browser() -> Iterator[webdriver.Chrome]:
    with open_browser() as browser:
        yield browser


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_link_leads_to_a_page_an_anchor_or_a_file(site: Path) -> None:
    assert broken_links(site) == []
    readme = re.findall(r"\]\(docs/([\w/]+)\.md#([\w-]+)\)", (DOCS.parent / "README.md").read_text())
    assert [
        (page, anchor) for page, anchor in readme if f'id="{anchor}"' not in (site / f"{page}.html").read_text()
    ] == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_names_of_other_projects_lead_there(site: Path) -> None:
    step, graphs = ((site / "api" / f"{page}.html").read_text() for page in ("train_steps", "graphs"))
    for address in (
        "https://docs.jax.dev/en/latest/_autosummary/jax.Array.html#jax.Array",
        "https://optax.readthedocs.io/en/latest/api/transformations.html#optax.GradientTransformation",
        "https://docs.python.org/3/library/collections.abc.html#collections.abc.Callable",
    ):
        assert f'href="{address}"' in step
    assert 'href="https://numpy.org/doc/stable/reference/generated/numpy.ndarray.html#numpy.ndarray"' in graphs
    jit = 'href="https://docs.jax.dev/en/latest/_autosummary/jax.jit.html#jax.jit"'
    assert jit in (site / "autocast.html").read_text()
    assert 'href="api/parallel.html#jmp_train.data_parallel"' in (site / "parallel.html").read_text()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_each_page_says_what_it_is_about_and_what_its_pictures_show(site: Path) -> None:
    pages = [path for path in site.rglob("*.html") if not path.relative_to(site).parts[0].startswith("_")]
    for page in pages:
        text = page.read_text()
        assert page.stem in GENERATED or re.search('<meta name="description" content=".{40}', text), page
        assert 'rel="icon"' in text
        article = text.partition("<article")[2].partition("</article>")[0]
        assert ("<h1" in article or page.stem == "search") and "| —" not in article, page  # a table's dashes
        assert not re.findall(r'<img (?![^>]*alt="[^"]{10})[^>]*>', article), page
    listed = re.findall(r"\]\((\S+\.html)\): (?=.{40})", (site / "llms.txt").read_text())
    assert {site / name for name in listed} == set(pages) - {site / f"{name}.html" for name in ("index", *GENERATED)}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_signatures_have_names_of_types_and_of_defaults(site: Path) -> None:
    signatures = {}
    for page in (site / "api").glob("*.html"):
        for name, inner in re.findall(r'<dt class="sig[^"]*"[^>]*id="([^"]*)">(.*?)</dt>', page.read_text(), re.DOTALL):
            signatures[name] = " ".join(html.unescape(re.sub("<[^>]+>", "", inner)).split())
    assert not [name for name, text in signatures.items() if len(text) > 1000 or "~" in text or " at 0x" in text]
    assert "rules: AutocastRules = TORCH_CUDA," in signatures["jmp_train.AutocastPolicy"]
    assert "reduce_dtype: DTypeLike = jnp.float32," in signatures["jmp_train.AutocastPolicy"]
    assert "rngs: Rngs," in signatures["jmp_train.graphs.GATConv"]
    assert signatures["jmp_train.graphs.gather"].startswith("gather( data: ArrayLike, indices: ArrayLike,")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", [390, 1300])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_readable_on_phone_and_desk(browser: webdriver.Chrome, site: Path, width: int, scheme: str) -> None:
    for name in ("index", "tutorials/graphs", "api/train_steps", "diagnose", "how_it_works/step", "project/results"):
        show(browser, site / f"{name}.html", width, scheme)
        assert browser.find_element(By.CSS_SELECTOR, "article h1").is_displayed()  # another is for print alone
        assert browser.execute_script("return document.documentElement.dataset.theme") == scheme
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    wanted = [entry["message"] for entry in browser.get_log("performance") if "requestWillBeSent" in entry["message"]]
    assert wanted and not [message for message in wanted if '"url":"http' in message]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in TUTORIALS if name != "plan"])
def test_the_code_of_a_tutorial_runs(name: str, tmp_path: Path) -> None:
    _run_cells(name, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("compiler", "tpu_compiler")
def test_the_code_of_the_tutorial_about_plans_runs(tmp_path: Path) -> None:
    _run_cells("plan", tmp_path)


def _run_cells(name: str, folder: Path) -> None:
    text = (DOCS / "tutorials" / f"{name}.md").read_text()
    code = []
    for cell in re.findall(r"```{code-cell} ipython3\n(.*?)```", text, re.DOTALL):
        if written := re.match(r"%%writefile (\S+)\n", cell):
            (folder / written[1]).write_text(cell[written.end() :])
        else:
            code.append(cell)
    assert len(code) > 3
    (folder / "tutorial.py").write_text('import matplotlib\n\nmatplotlib.use("agg")\n' + "\n".join(code))
    run_python("tutorial.py", cwd=folder, timeout=800)
