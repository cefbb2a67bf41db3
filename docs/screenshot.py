"""A picture of the top of a report: `python docs/screenshot.py runs/demo/report.html docs/img/report.png`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SIZE = "1280,1040"


def main(page: Path, picture: Path) -> None:
    found = (path for name in ("chromium", "chromium-browser") if (path := shutil.which(name)))
    browser = next(found, None)
    if browser is None:
        sys.exit("chromium is not installed; on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        flags = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--virtual-time-budget=20000", f"--window-size={SIZE}", f"--user-data-dir={profile}"),
        ]
        command = [browser, *flags, f"--screenshot={picture.resolve()}", page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode or not picture.exists():
        sys.exit(f"chromium made no picture of {page}: {done.stderr[-400:]}")
    print(f"{picture}: {picture.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
