"""Install pip from PyPI into the interpreter that runs this, which has none."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

INDEX = "https://pypi.org/pypi/pip/json"


def main() -> int:
    with urlopen(INDEX, timeout=60) as answer:
        files = json.load(answer)["urls"]
    wheel = next(f for f in files if f["packagetype"] == "bdist_wheel")
    url = urljoin(INDEX, wheel["url"])
    with urlopen(url, timeout=60) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != wheel["digests"]["sha256"]:
        sys.exit(f"{url} does not have the hash that PyPI names")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / wheel["filename"]
        path.write_bytes(data)
        # A wheel is a zip file, and Python runs pip out of it.
        command = [sys.executable, f"{path}/pip", "install", "--quiet", str(path)]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
