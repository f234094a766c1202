"""Debian's Prometheus as a process, with this project's alerts accelerated, and its HTTP API."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

INTERVAL = "1s"  # of scrapes and evaluations
FASTER = 60  # a minute of an alert's windows and patience is a second here
MIN_WINDOW_SECONDS = 4  # a rate takes two scrapes, and one may be late
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
INSTALLED = shutil.which("prometheus") is not None
Sample = dict[str, Any]  # {"metric": labels, "value": [time, text]}


def faster_rules(text: str) -> str:
    """Return the rules with every window and every `for` divided by FASTER; nothing else changes."""

    def seconds(duration: re.Match[str], least: int) -> str:
        return f"{max(least, round(int(duration[1]) * SECONDS[duration[2]] / FASTER))}s"

    text = re.sub(r"\[(\d+)([smhd])\]", lambda found: f"[{seconds(found, MIN_WINDOW_SECONDS)}]", text)
    return re.sub(r"(?<=for: )(\d+)([smhd])", lambda found: seconds(found, 1), text)


class Prometheus:
    """One server. `scrapes`: its scrape_configs."""

    def __init__(self, folder: Path, port: int, scrapes: list[dict[str, Any]], rules: str) -> None:
        folder.mkdir()
        (folder / "alerts.yml").write_text(rules)
        config = {
            "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": ["alerts.yml"],
            "scrape_configs": scrapes,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data",
                    f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
                ],
                cwd=folder, stdout=log, stderr=log,
            )  # fmt: skip
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10.0)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if self._http.get("/-/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"prometheus is not ready:\n{self._log.read_text()[-2000:]}")

    def wait_for(self, expression: str, num_samples: int = 1) -> None:
        """Wait until the expression has so many samples."""
        deadline = time.monotonic() + 30.0
        while len(self.query(expression)) != num_samples:
            assert time.monotonic() < deadline, f"{expression} does not come: {self.query('up')}"
            time.sleep(0.1)

    def query(self, expression: str) -> list[Sample]:
        reply = self._http.get("/api/v1/query", params={"query": expression}).json()
        assert reply["status"] == "success", f"{expression}: {reply}"
        found: list[Sample] = reply["data"]["result"]
        return found

    def label_values(self, series: str, label: str) -> list[str]:
        """Return the values that a dashboard's variable `label_values(series, label)` offers."""
        reply = self._http.get(f"/api/v1/label/{label}/values", params={"match[]": series}).json()
        found: list[str] = reply["data"]
        return found

    def firings(self) -> list[dict[str, str]]:
        """Return the labels of all alerts that have been firing at any time."""
        return [sample["metric"] for sample in self.query('count_over_time(ALERTS{alertstate="firing"}[10m])')]

    def fired(self) -> set[str]:
        """Return the names of these alerts."""
        return {labels["alertname"] for labels in self.firings()}

    def summaries(self) -> set[str]:
        """Return the summaries of the alerts that are firing now."""
        alerts = self._http.get("/api/v1/alerts").json()["data"]["alerts"]
        return {alert["annotations"]["summary"] for alert in alerts if alert["state"] == "firing"}

    def stop(self) -> None:
        self._http.close()
        self._process.terminate()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
