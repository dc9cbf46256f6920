"""Install pip from PyPI into the interpreter that runs this, which has none.

The version and the hash of the reviewed file are fixed here, and compared with those
of the download.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import urlopen

WHEEL = "pip-25.3-py3-none-any.whl"
FOLDER = "44/3c/d717024885424591d5376220b5e836c2d5293ce2011523c9de23ff7bf068"
URL = f"https://files.pythonhosted.org/packages/{FOLDER}/{WHEEL}"
SHA256 = "9655943313a94722b7774661c21049070f6bbb0a1516bf02f7c8d5d9201514cd"


def main(url: str = URL) -> int:
    with urlopen(url, timeout=60) as answer:
        data = answer.read()
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256:
        sys.exit(f"{url} is not installed: its SHA-256 is {digest}, not {SHA256}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / WHEEL
        path.write_bytes(data)
        # A wheel is a zip file, and Python runs pip out of it.
        command = [sys.executable, f"{path}/pip", "install", "--quiet", str(path)]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
