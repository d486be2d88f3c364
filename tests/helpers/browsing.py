"""Pages as a browser shows them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait


@contextmanager
def open_browser() -> Iterator[webdriver.Chrome]:
    """Opens Chromium, which logs what it loads; skips the test where there is none."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not there: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield browser
    finally:
        browser.quit()


def show(browser: webdriver.Chrome, file: Path, width: int, scheme: str, query: str = "") -> None:
    """Shows a page and waits until it is loaded.

    Args:
      browser: from `open_browser`.
      file: the page.
      width: of the window in pixels; below 500 it is a phone's.
      scheme: "light" or "dark".
      query: what comes after the page's address, with its question mark.
    """
    metrics = {"width": width, "height": 2400, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(file.as_uri() + query)
    WebDriverWait(browser, 20).until(lambda page: page.execute_script("return document.readyState") == "complete")
