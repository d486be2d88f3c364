"""The site: every public name once in its reference, every page built, looked at in a browser."""

import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from browsing import open_browser, show
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

import jmp_train as jt
import jmp_train.graphs
import jmp_train.policies

pytestmark = pytest.mark.quick

DOCS = Path(__file__).parents[2] / "docs"
FACES = (jt, jmp_train.policies, jmp_train.graphs)
NOT_SHOWN = {"PyTree"}  # any tree: a name for readers of signatures
TUTORIALS = sorted(path.stem for path in (DOCS / "tutorials").glob("*.md"))


def documented_names(folder: Path) -> dict[str, str]:
    """Returns the full names of all that the pages in a folder document, by name."""
    spec = importlib.util.spec_from_file_location("documented_names", DOCS / "extensions" / "documented_names.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.documented_names(folder)


def missing_names(folder: Path) -> set[str]:
    """Returns the public names that the pages in a folder lack."""
    return {name for face in FACES for name in _names(face)} - documented_names(folder).keys() - NOT_SHOWN


def _names(face: ModuleType) -> Iterator[str]:
    yield from ("Allowances", "Plan", "PlanRow", "plan") if face is jt else ()
    yield from (name for name, thing in vars(face).items() if not name.startswith("_") and not inspect.ismodule(thing))


def test_the_reference_has_every_public_name() -> None:
    assert missing_names(DOCS / "api") == set()


def test_a_name_that_the_reference_lacks_or_has_twice_is_found(tmp_path: Path) -> None:
    for page in (DOCS / "api").glob("*.rst"):
        (tmp_path / page.name).write_text(re.sub(r"^   train_step\n", "", page.read_text(), flags=re.MULTILINE))
    assert missing_names(tmp_path) == {"train_step"}
    (tmp_path / "twice.rst").write_text(".. api:: jmp_train\n\n   autocast\n")
    with pytest.raises(ValueError, match=r"jmp_train\.autocast is documented twice, as jmp_train\.autocast too"):
        documented_names(tmp_path)


@pytest.fixture(name="site", scope="module")
def fixture_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site without its notebooks run, which have a test each."""
    folder = tmp_path_factory.mktemp("site")
    settings = ("-W", "--keep-going", "-D", "nb_execution_mode=off", "-D", "suppress_warnings=myst-nb.lexer")
    command = (sys.executable, "-m", "sphinx", "-b", "html", "-q", *settings, str(DOCS), str(folder))
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(name="browser", scope="module")
def fixture_browser() -> Iterator[webdriver.Chrome]:
    with open_browser() as browser:
        yield browser


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", [390, 1300])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_readable_on_phone_and_desk(browser: webdriver.Chrome, site: Path, width: int, scheme: str) -> None:
    for name in ("index", "tutorials/graphs", "api/train_steps", "diagnose", "project/results"):
        show(browser, site / f"{name}.html", width, scheme)
        assert browser.find_element(By.TAG_NAME, "h1").is_displayed()
        assert browser.execute_script("return document.documentElement.dataset.theme") == scheme
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    wanted = [entry["message"] for entry in browser.get_log("performance") if "requestWillBeSent" in entry["message"]]
    assert wanted and not [message for message in wanted if '"url":"http' in message]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_search_finds_a_name_and_the_link_to_it_leads_there(browser: webdriver.Chrome, site: Path) -> None:
    show(browser, site / "search.html", 1300, "light", query="?q=torch_loss_scale")
    found = "#search-results li a[href*='loss_scales']"
    link = WebDriverWait(browser, 30).until(lambda page: page.find_element(By.CSS_SELECTOR, found))
    address = link.get_attribute("href")
    assert address is not None
    browser.get(address)
    assert browser.find_element(By.ID, "jmp_train.torch_loss_scale").is_displayed()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in TUTORIALS if name != "plan"])
def test_the_code_of_a_tutorial_runs(name: str, tmp_path: Path) -> None:
    _run_cells(name, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("compiler")
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
    result = subprocess.run(
        (sys.executable, "tutorial.py"), cwd=folder, capture_output=True, text=True, check=False, timeout=800
    )
    assert result.returncode == 0, result.stderr
