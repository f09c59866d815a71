"""A headless Chromium that pages are looked at with."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

REQUIRED = "KVWINNOW_REQUIRE_BROWSER"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900")
TOKENS = "#text > .t"
CHART = "document.querySelector('#memory .plot')"


def start() -> webdriver.Chrome:
    """A browser; where there is none the test is skipped, or fails if one is required."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = " and ".join(name for name, path in (("chromium", browser), ("chromedriver", driver)) if path is None)
        why = f"{missing} not found on PATH, so pages cannot be looked at; on Debian: apt-get install chromium-driver"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{why} ({REQUIRED}=1 asks for it)")
        pytest.skip(why)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # The path to the driver is given, so that selenium looks for none and downloads nothing.
    return webdriver.Chrome(options=options, service=Service(driver))


class View:
    """One page in the browser, as a reader uses it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, page: Path, width: int = 1280, height: int = 500) -> None:
        self.size(width, height)
        self.theme("light")
        self.driver.get_log("performance")
        self.driver.get_log("browser")
        self.driver.get(page.as_uri())
        WebDriverWait(self.driver, 60).until(lambda _: self.js("return document.documentElement.dataset.ready"))

    def js(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def settle(self) -> None:
        """Wait for what the last action draws."""
        self.driver.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 0));")

    def chart(self) -> list[dict[str, Any]]:
        """The traces of the memory chart, which is drawn once it is in sight."""
        self.js("document.getElementById('memory').scrollIntoView({block: 'center'})")
        WebDriverWait(self.driver, 60).until(lambda _: self.js(f"return {CHART}.dataset.drawn"))
        self.settle()
        found: list[dict[str, Any]] = self.js(f"return {CHART}.data")
        return found

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def many(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Without regard to whether it is in sight."""
        found: str = self.js("return document.querySelector(arguments[0]).textContent", selector)
        return found

    def choose(
        self, *, policy: str | None = None, layer: object = None, head: object = None, step: int | None = None
    ) -> None:
        """Use the controls; a policy is named by what its option says."""
        if policy is not None:
            Select(self.one("#policy")).select_by_visible_text(policy)
        if layer is not None:
            Select(self.one("#layer")).select_by_value(str(layer))
        if head is not None:
            Select(self.one("#head")).select_by_value(str(head))
        if step is not None:
            slide = "const s = document.getElementById('step'); s.value = arguments[0];"
            self.js(f"{slide} s.dispatchEvent(new Event('input', {{bubbles: true}}));", step)
        self.settle()

    def shares(self) -> list[float]:
        """The share that each token of the prompt shows."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].map((n) => Number(n.style.getPropertyValue('--kept')))"
        )
        found: list[float] = self.js(script, TOKENS)
        return found

    def hover(self, selector: str, index: int) -> str:
        """Point at an element with the mouse; returns what the tooltip says."""
        target = self.many(selector)[index]
        self.js("arguments[0].scrollIntoView({block: 'center'})", target)
        ActionChains(self.driver).move_to_element(target).perform()
        self.settle()
        return self.one("#tip").text

    def point_at(self, x: float, y: float, *, click: bool = False) -> None:
        """Point at a place of the window with the mouse."""
        actions = ActionChains(self.driver)
        actions.w3c_actions.pointer_action.move_to_location(round(x), round(y))
        if click:
            actions.click()
        actions.perform()
        self.driver.execute_async_script("setTimeout(arguments[0], 150)")  # plotly looks at the pointer at intervals

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()
        self.settle()

    def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def theme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def errors(self) -> list[str]:
        """What the console complained about since the page was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def requests(self) -> Sequence[str]:
        """Addresses that were asked for since the page was opened, the page itself included.

        Those of blobs are left out: they name what the page itself has in memory.
        """
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [address for address in asked if not address.startswith("blob:")]
