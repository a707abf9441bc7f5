"""A browser on the page of a server, driven by selenium."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from urllib.parse import urlsplit

import pytest

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--window-size=1200,900", "--force-prefers-reduced-motion", "--mute-audio", "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip


class Browser:
    """A browser on the page of a server. hosts: where it sent requests; posted: the bodies that it sent."""

    def __init__(self, driver):
        self.driver, self.hosts, self.posted = driver, set(), []

    def open(self, url):
        self.driver.execute_script("sessionStorage.clear()") if self.driver.current_url.startswith("http") else None
        self.driver.get(url + "/")
        return self

    def until(self, script, what="it"):
        """Wait until a JavaScript expression is true, and return its value."""
        end = time.monotonic() + 20
        while not (value := self.driver.execute_script(f"return {script}")):
            assert time.monotonic() < end, f"{what}: not within 20 s: {script}\n{self.text('body')}"
            time.sleep(0.02)
        return value

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def count(self, selector):
        return len(self.driver.find_elements("css selector", selector))

    def text(self, selector):
        return self.driver.execute_script("return document.querySelector(arguments[0]).innerText", selector)

    def type(self, selector, text):
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def keys(self, *keys):
        self.driver.switch_to.active_element.send_keys("".join(keys))

    def chord(self, key):
        from selenium.webdriver import ActionChains, Keys

        ActionChains(self.driver).key_down(Keys.CONTROL).send_keys(key).key_up(Keys.CONTROL).perform()

    def run(self, button="#run", **fields):
        """Fill fields, press a button and wait for the end of the answer."""
        self.driver.execute_script(
            "for (const [name, text] of Object.entries(arguments[0])) document.forms.ask.elements[name].value = text",
            fields,
        )
        self.find(button).click()
        self.until("!document.querySelector('#run').disabled", "the answer")

    def answer(self, *events):
        """Let every request be answered by these events, instead of by the server."""
        said = "".join(f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in events)
        self.driver.execute_script("const said = arguments[0]; window.fetch = async () => new Response(said)", said)

    def facts(self):
        """What the page says of the answer, by name."""
        return self.driver.execute_script(
            "return Object.fromEntries([...document.querySelectorAll('#facts > div')]"
            ".map((one) => [one.querySelector('dt').innerText, one.querySelector('dd').firstChild.textContent]))"
        )

    def said(self):
        """The text of the answer, token by token as it is shown."""
        return self.driver.execute_script(
            "return [...document.querySelectorAll('#tokens .token')].map((one) => one.textContent)"
        )

    def look(self):
        """Take in what happened since: requests, and what the console says."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                request = message["params"]["request"]
                self.hosts.add(urlsplit(request["url"]).hostname)
                if "postData" in request:
                    self.posted.append(request["postData"])
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@contextlib.contextmanager
def started(folder):
    """A browser that keeps its files in a folder; skips where none is installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no browser driver: make page")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        driver.get("about:blank")
        driver.get_log("performance")  # of the browser's own first page
        yield Browser(driver)
    finally:
        driver.quit()
