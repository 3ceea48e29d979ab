"""Screenshot of the page of `ragblend ui`, with the answer to one of the demo's questions.

    python -m tools.pictures.page        # docs/ui.png

Requires Debian's chromium and chromium-driver. The times on the page are those of the machine that makes the picture.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

OUT = Path(__file__).parents[2] / "docs" / "ui.png"
WIDTH, HEIGHT = 1120, 2330


def main() -> None:
    """Start `ragblend ui` in a new folder, and save a screenshot of the first example."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ragblend", "ui", "--demo", "--no-browser", "--port", str(port)]
    with tempfile.TemporaryDirectory() as home:
        path = os.pathsep.join((str(OUT.parents[1]), os.environ.get("PYTHONPATH", "")))
        server = subprocess.Popen(command, cwd=home, env={**os.environ, "PYTHONPATH": path})
        try:
            url = f"http://127.0.0.1:{port}/"
            _wait_for(f"{url}state")
            photograph(url, OUT)
        finally:
            server.terminate()
            server.wait()


def photograph(url: str, out: Path) -> None:
    """Ask the page's first example twice, the first time as a warm-up. Save a screenshot to `out`."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    with webdriver.Chrome(options, Service(shutil.which("chromedriver"))) as driver:
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(url)
        wait = WebDriverWait(driver, 120)
        for _ in range(2):
            wait.until(lambda _: driver.find_elements(By.CSS_SELECTOR, "#examples button"))
            driver.find_element(By.CSS_SELECTOR, "#examples button").click()
            wait.until(lambda _: driver.find_element(By.ID, "go").text == "Ask")
        driver.execute_script("document.activeElement.blur()")
        time.sleep(0.5)  # until the animation of the bars has ended
        driver.save_screenshot(str(out))


def _wait_for(url: str) -> None:
    for _ in range(600):
        try:
            if httpx.get(url, trust_env=False).json()["status"] == "ready":
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"{url} is not ready")


if __name__ == "__main__":
    main()
