"""The doctor works with anything missing, and reports what it found."""

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from etc_dist import cli, doctor
from etc_dist.cache import Cache, Entry
from etc_dist.ops.tuning import default_tuning, save_tuning
from etc_dist.settings import Settings

# Shortened from a machine with three GPUs, the last of them without NVLink.
TOPOLOGY = """
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0
GPU1\tNV18\t X \tSYS\tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1
NIC0\tPIX\tSYS\tSYS\t X \t\t
"""
LISTING = """\
0, NVIDIA H200, 143771 MiB, 9.0, 580.159.03
1, NVIDIA H200, 143771 MiB, 9.0, 580.159.03"""
SUMMARY = "| NVIDIA-SMI 580.159.03   Driver Version: 580.159.03   CUDA Version: 13.0 |"

CTYPES = """
class c_int:
    value = 0
def byref(number):
    return number
class CDLL:
    def __init__(self, name):
        self.cuInit = lambda flags: 0
        self.cuDeviceGet = lambda device, number: 0
    def cuDeviceGetAttribute(self, value, number, device):
        value.value = 1
        return number == 999
"""


RUN_PYTHON = cache(doctor._run_python)
"""Looks for each library once, as the tests change none."""


@pytest.fixture
def no_gpu(tmp_path, monkeypatch):
    """An nvidia-smi that finds no driver, as the first in PATH."""
    monkeypatch.setattr(doctor, "_run_python", RUN_PYTHON)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("ETC_DIST_BACKEND", raising=False)


def test_advice_to_install_from_a_checkout_is_editable():
    root = Path(doctor.__file__).parent.parent
    texts = [*root.joinpath("etc_dist").rglob("*.py"), root / "README.md"]
    assert [t.name for t in texts if "pip install '." in t.read_text()] == []


def test_machine_without_gpu_gets_the_cpu_backend(no_gpu, capsys):
    assert cli.main(["doctor"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "backend cpu will be used because no NVIDIA GPU was found"


def test_json_has_every_finding_and_the_verdict(no_gpu, capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    topics = {finding["topic"] for finding in report["findings"]}
    assert {"Python", "GPUs", "CuPy", "NVRTC", "NVSHMEM", "NCCL", "MPI"} <= topics
    assert "emulator" in topics
    assert {"mpirun", "NVLS", "compile cache", "shared memory", "tile tuning"} <= topics
    assert report["backend"] == "cpu"


def test_libraries_that_are_missing_take_one_short_line_each(no_gpu, monkeypatch):
    long = "cuda.pathfinder.DynamicLibNotFoundError: Failure finding a, b, c, d, e, f"
    monkeypatch.setattr(doctor, "_run_python", lambda source: doctor.Output("", long))
    findings = {f.topic: f for f in doctor.examine().findings}
    for topic, extra in {"NVRTC": "[compile]", "emulator": "[emulate]"}.items():
        assert findings[topic].found == "missing" and extra in findings[topic].fix


def test_gpu_backend_without_gpu_is_no_backend(no_gpu, monkeypatch, capsys):
    monkeypatch.setenv("ETC_DIST_BACKEND", "cuda")
    assert cli.main(["doctor"]) == 1
    assert "needs a GPU, but no NVIDIA GPU" in capsys.readouterr().out


def test_unreadable_settings_are_a_finding_not_a_crash(no_gpu, monkeypatch, capsys):
    monkeypatch.setenv("ETC_DIST_BACKENT", "cpu")
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "unset it: ETC_DIST_BACKENT" in out
    assert out.endswith("because the settings cannot be read\n")


def test_cache_that_cannot_be_used_is_pointed_out(tmp_path):
    (tmp_path / "file").write_text("")
    finding = doctor._cache(tmp_path / "file")
    assert finding.found.endswith(f"cannot be used: {tmp_path}/file is not a folder")
    assert finding.fix == "set ETC_DIST_CACHE to a folder that only you can write"


def test_size_of_the_cache_is_shown(tmp_path):
    Cache(tmp_path / "c").store("programs", "k", Entry({}, {"cubin": bytes(1 << 20)}))
    finding = doctor._cache(tmp_path / "c")
    assert finding.found == (
        f"{tmp_path}/c, 1 programs in 1.0 MiB, 0 libraries in 0.0 MiB, "
        "0 proofs in 0.0 MiB, 0 tunings in 0.0 MiB"
    )
    assert finding.fix == ""


def test_the_tuning_of_this_kind_of_gpu_is_shown(tmp_path):
    settings, listing = Settings(cache=tmp_path / "c"), LISTING.replace("H200", "GB99")
    shipped, fallback = (doctor._tuning(settings, text) for text in (LISTING, listing))
    assert shipped.found.startswith("NVIDIA H200, of the package, checksum ")
    assert "since NVIDIA GB99 has none" in fallback.found
    assert (shipped.fix, fallback.fix) == ("", "etc-dist tune")
    tuning = replace(default_tuning(), device="NVIDIA GB99")
    save_tuning(Cache(settings.cache), tuning)
    finding = doctor._tuning(settings, listing)
    assert finding.found.startswith("NVIDIA GB99, by etc-dist tune, checksum ")
    assert doctor._tuning(replace(settings, tuning="/no/file"), "").fix


def test_full_output_ends_with_an_error(tmp_path):
    command = "etc_dist.cli", "new-function", "scale", "--folder", str(tmp_path)
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert process.returncode == 1
    first, *advice = process.stderr.splitlines()
    assert first == "ArgumentError: the output of the command cannot be written"
    assert len(advice) == 4


def test_bare_python_gets_the_packages_to_install(no_gpu):
    # No packages but the standard library here; and none in its commands, since
    # their interpreter does not exist.
    root = cli.__file__.rsplit("/etc_dist/", 1)[0]
    program = f"import sys; sys.path.append({root!r}); sys.executable += '-absent'"
    program += "; from etc_dist import doctor; print(doctor.examine().show())"
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert "to do: pip install mpi4py mpich" in process.stdout
    assert "no backend can be used" in process.stdout


def test_gpus_are_counted_by_kind():
    lines = [f.show() for f in doctor.describe_gpus(LISTING, "")]
    assert lines == ["GPUs              2 x NVIDIA H200, 143771 MiB, sm_90"]


def test_warnings_of_nvidia_smi_do_not_count_as_gpus():
    odd = "a warning\n2, NVIDIA H200, [N/A], [N/A], 580.159.03\n"
    (finding,) = doctor.describe_gpus(odd, "")
    assert (finding.found, finding.fix) == ("1 x NVIDIA H200, [N/A], sm_[N/A]", "")
    (none,) = doctor.describe_gpus("a warning\n", "")
    assert none.found.startswith("none found")
    driver, _ = doctor.describe_driver(odd, SUMMARY)
    assert driver.found == "580.159.03"
    assert [*doctor.describe_driver("a warning\n", SUMMARY)] == []
    assert not doctor._tuning(Settings(), "a warning\n").fix


def test_output_that_is_not_utf8_is_shown():
    code = "import os; os.write(1, b'\\xff')"
    assert doctor._run_python(code).text == "\ufffd"


def test_a_number_of_ranks_that_is_not_numeric_is_ignored(monkeypatch):
    monkeypatch.setattr(doctor, "_run_python", lambda source: doctor.Output("1"))
    findings = [doctor._sharing(LISTING, {"LAUNCH_RANKS": n}) for n in ("x", "")]
    assert findings[0] == findings[1]


def test_links_are_counted_by_pair():
    assert doctor.count_links(TOPOLOGY) == {"NV18": 1, "SYS": 2}


def test_pair_without_nvlink_is_pointed_out():
    *_, links = doctor.describe_gpus(LISTING, TOPOLOGY)
    assert links.found == "pairs of GPUs by link: NV18: 1, SYS: 2"
    assert "some pairs have no NVLink" in links.fix


@pytest.mark.parametrize(
    ("version", "extra"), [("12.8", "cu12"), ("13.0", "cu13"), ("14.1", "cu13")]
)
def test_extra_follows_the_driver(version, extra):
    assert doctor.cuda_extra(SUMMARY.replace("13.0", version)) == extra


def test_no_driver_no_extra():
    assert doctor.cuda_extra("NVIDIA-SMI has failed") == ""


def test_nvls_is_disabled_by_either_variable():
    assert doctor.disabled_by({"NCCL_NVLS_ENABLE": "1"}) == []
    assert doctor.disabled_by({"NVSHMEM_DISABLE_NVLS": "1"}) == [
        "NVSHMEM_DISABLE_NVLS=1"
    ]


def test_attributes_of_a_gpu_are_read_without_asserts(tmp_path, monkeypatch):
    # A module ctypes with a driver that gives 1 for each attribute, or none.
    (tmp_path / "ctypes.py").write_text(CTYPES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    assert doctor._run_python(doctor._ATTRIBUTE.format(number=132)).text == "1"
    assert doctor._run_python(doctor._ATTRIBUTE.format(number=999)).text == ""


def test_hosts_name_the_ranks_of_a_launcher():
    variables = {"MPI_LOCALNRANKS": "2", "PMI_SIZE": "4"}
    assert "2 of 4 ranks on this host" in doctor.describe_hosts(variables).found
    assert "one rank; several hosts" in doctor.describe_hosts({}).found
