"""The TCP transport of tests/far_transport, with host memory in place of a GPU's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MESSAGE_US = (1 << 20) / 0.1e3
"""Of a megabyte at 0.1 GB/s."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The transport, and the functions of the driver that it needs."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder, paths = tmp_path_factory.mktemp("transport"), []
    for name, library in (
        ("transport", "nvshmem_transport_ibrc.so.3"),
        ("driver", "libcuda.so.1"),
    ):
        paths.append(folder / library)
        command = ["g++", "-O2", "-Wall", "-Wextra", "-Werror", "-std=c++17", "-shared"]
        command += ["-fPIC", f"-Wl,-soname,{library}", "-o", str(paths[-1])]
        subprocess.run(
            [*command, str(HERE / f"{name}.cpp"), "-ldl", "-pthread"], check=True
        )
    return paths


@pytest.mark.parametrize("delay", [0, 20_000])
@pytest.mark.parametrize("gbs", [0, 0.1])
def test_messages_arrive_after_the_delay_and_at_the_rate(libraries, delay, gbs):
    command = [sys.executable, str(HERE / "two_ranks.py"), *map(str, libraries)]
    command += [str(delay), str(gbs)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    first, last, quiet = map(float, process.stdout.split())
    least = delay + (MESSAGE_US if gbs else 0)
    assert least <= first <= last and least + delay <= quiet
    # Messages do not wait for the delay of earlier ones.
    assert max(last, quiet) < least + delay + 200_000
