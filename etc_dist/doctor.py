"""A report on this machine, and the backend that will be used on it.

Each library is loaded in a separate process, so that one that crashes or hangs costs a
line of the report and no more."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from etc_dist.cache import Cache
from etc_dist.errors import EtcDistError
from etc_dist.ops.tuning import find_tuning
from etc_dist.settings import Settings, describe_sharing

GIB = 1 << 30
MIB = 1 << 20
LIMIT = 60.0  # seconds that one command may take


@dataclass(frozen=True)
class Finding:
    """One line of the report; `fix` says how to get what is missing."""

    topic: str
    found: str
    fix: str = ""

    def show(self) -> str:
        """The finding as a line of text, and how to get what is missing."""
        lines = [f"{self.topic:18}{self.found}"]
        if self.fix:
            lines.append(f"{'':18}to do: {self.fix}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """All findings and the verdict; `backend` is empty where no start is possible."""

    findings: tuple[Finding, ...]
    backend: str
    because: str

    def show(self) -> str:
        """The report as text."""
        return "\n".join([*(f.show() for f in self.findings), "", self.verdict()])

    def verdict(self) -> str:
        """The backend that will be used, or why none can be."""
        if not self.backend:
            return f"no backend can be used because {self.because}"
        return f"backend {self.backend} will be used because {self.because}"

    def to_json(self) -> str:
        """The report for programs."""
        return json.dumps(asdict(self) | {"verdict": self.verdict()}, indent=2)


def examine() -> Report:
    """Examine this machine; raises nothing, also where everything is missing."""
    summary = _run(["nvidia-smi"])
    gpus = _run(["nvidia-smi", f"--query-gpu={_GPU_COLUMNS}", "--format=csv,noheader"])
    findings = [
        *_system(),
        *describe_gpus(gpus.text, _run(["nvidia-smi", "topo", "-m"]).text),
        *describe_driver(gpus.text, summary.text),
        *_libraries(cuda_extra(summary.text)),
        *_mpi(),
        describe_hosts(os.environ),
        _nvls(bool(gpus.text)),
    ]
    try:
        settings = Settings.load()
    except EtcDistError as error:
        findings.append(Finding("settings", error.what, f"{error.fix}: {error.got}"))
        return Report(tuple(findings), "", "the settings cannot be read")
    if settings.share_gpu:
        findings.append(_sharing(gpus.text, os.environ))
    findings.append(_cache(settings.cache))
    findings.append(_tuning(settings, gpus.text))
    backend, because = _choose(settings.backend, bool(gpus.text))
    return Report(tuple(findings), backend, because)


# -------------------------------------------------------------------------- commands


@dataclass(frozen=True)
class Output:
    """Standard output of a command; or why there is none, in one line."""

    text: str = ""
    fault: str = ""


def _run(command: list[str]) -> Output:
    # Under mpirun the command must not join the job.
    names = ("PMI_", "PMIX_", "OMPI_COMM_", "SLURM_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT,
            env=environment,
            check=False,
        )
    except OSError as error:
        return Output(fault=error.strerror or str(error))
    except subprocess.TimeoutExpired:
        return Output(fault=f"no result within {LIMIT:g} s")
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        return Output(fault=lines[-1] if lines else f"exit code {result.returncode}")
    return Output(text=result.stdout.strip())


def _run_python(source: str) -> Output:
    return _run([sys.executable, "-c", source])


# Finds a library in the same way as the package itself.
_LOAD = """
import ctypes
from cuda.pathfinder import load_nvidia_dynamic_lib
path = load_nvidia_dynamic_lib({name!r}).abs_path
library = ctypes.CDLL(path)
numbers = [ctypes.c_int() for _ in range({count})]
library.{function}(*map(ctypes.byref, numbers))
print(*(number.value for number in numbers), path)
"""
_CUPY = "import cupy; print(cupy.__version__, cupy.__path__[0])"
_ZIG = """
import importlib.metadata, ziglang
version = importlib.metadata.version("ziglang")
print("the C++ compiler ziglang", version, *ziglang.__path__)
"""
_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
name = MPI.Get_library_version().splitlines()[0].strip(chr(0))
print(mpi4py.__version__, name)
"""
_ATTRIBUTE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
device, value = ctypes.c_int(), ctypes.c_int()
error = (
    cuda.cuInit(0)
    or cuda.cuDeviceGet(ctypes.byref(device), 0)
    or cuda.cuDeviceGetAttribute(ctypes.byref(value), {number}, device)
)
print("" if error else value.value)
"""
_MULTICAST_SUPPORTED, _MPS_ENABLED = 132, 133  # of CUdevice_attribute
_NEEDED = "import ml_dtypes, numpy"
_OBSTACLE = "from etc_dist.world.choice import find_gpus; print(find_gpus().missing)"

# --------------------------------------------------------------------------- findings


def _system() -> Iterator[Finding]:
    release = ""
    with contextlib.suppress(OSError, KeyError):
        release = ", " + platform.freedesktop_os_release()["PRETTY_NAME"]
    system = f"{platform.system()} {platform.release()}{release}"
    yield Finding("operating system", f"{system}, {platform.machine()}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_cores = len(os.sched_getaffinity(0))
    yield Finding("CPU", f"{num_cores} cores, {memory / GIB:.0f} GiB memory")
    yield _shared_memory(Path("/dev/shm"))
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")


def _shared_memory(folder: Path) -> Finding:
    topic = "shared memory"
    try:
        size = shutil.disk_usage(folder).total
    except OSError as error:
        return Finding(topic, f"{folder} is not there: {error.strerror}", "mount it")
    small = "the cpu backend puts arrays there; for Docker: --shm-size=8g"
    text = f"{size / GIB:.1f} GiB in {folder}"
    return Finding(topic, text, small if size < GIB else "")


_GPU_COLUMNS = "index,name,memory.total,compute_cap,driver_version"


def _gpu_rows(listing: str) -> list[list[str]]:
    """The values of _GPU_COLUMNS of each GPU. nvidia-smi also prints warnings."""
    rows = [line.split(", ") for line in listing.splitlines()]
    return [row for row in rows if len(row) == len(_GPU_COLUMNS.split(","))]


def describe_gpus(listing: str, topology: str) -> Iterator[Finding]:
    """The GPUs and the links between them, from the output of nvidia-smi."""
    rows = _gpu_rows(listing)
    if not rows:
        fix = "none, if this machine has no NVIDIA GPU; else install its driver"
        yield Finding("GPUs", "none found (nvidia-smi lists no GPU)", fix)
        return
    kinds = Counter(
        f"{name}, {memory}, sm_{capability.replace('.', '')}"
        for _, name, memory, capability, *_ in rows
    )
    text = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    majors = [row[3].partition(".")[0] for row in rows]  # or [N/A]
    is_old = any(int(major) < 9 for major in majors if major.isdigit())
    yield Finding("GPUs", text, "kernels need sm_90 or newer" if is_old else "")
    links = count_links(topology)
    if links:
        text = ", ".join(f"{kind}: {n}" for kind, n in sorted(links.items()))
        text = f"pairs of GPUs by link: {text}"
        is_slow = any(not kind.startswith("NV") for kind in links)
        fix = "expect slow transfers: some pairs have no NVLink" if is_slow else ""
        yield Finding("links", text, fix)


def count_links(topology: str) -> Counter[str]:
    """Pairs of GPUs by kind of link, from `nvidia-smi topo -m`."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines()]
    matrix = [row[1:] for row in rows if row and re.fullmatch(r"GPU\d+", row[0])]
    # The heading begins with GPU0 too, and has names where the matrix has links.
    matrix = [row for row in matrix if "X" in row]
    return Counter(row[j] for i, row in enumerate(matrix) for j in range(i))


def describe_driver(listing: str, summary: str) -> Iterator[Finding]:
    """The driver and its CUDA, from the output of two calls of `nvidia-smi`."""
    if rows := _gpu_rows(listing):
        yield Finding("driver", rows[0][-1])
        yield Finding("CUDA", f"the driver supports up to {cuda_version(summary)}")


def cuda_version(summary: str) -> str:
    """The newest CUDA that the driver supports, from plain `nvidia-smi`."""
    match = re.search(r"CUDA Version:\s*([\d.]+)", summary)
    return match[1] if match else ""


def cuda_extra(summary: str) -> str:
    """The extra of this package that fits the driver; empty without a driver."""
    version = cuda_version(summary)
    if not version:
        return ""
    return "cu13" if int(version.split(".")[0]) >= 13 else "cu12"


def _libraries(extra: str) -> Iterator[Finding]:
    checkout = "in the checkout of etc_dist: pip install -e"
    install = f"{checkout} '.[{extra}]'" if extra else ""
    without = "missing; not needed without a GPU"

    def finding(topic: str, output: Output, fix: str = install) -> Finding:
        if output.text:
            version, _, place = output.text.rpartition(" ")
            return Finding(topic, f"{version} ({place})")
        # cuda-pathfinder lists every file name that it tried.
        why = "" if "LibNotFoundError" in output.fault else f" ({output.fault})"
        return Finding(topic, f"missing{why}" if fix else without, fix)

    yield finding("CuPy", _run_python(_CUPY))
    build = install or f"{checkout} '.[compile]', to build kernels without a GPU"
    yield finding("NVRTC", _library("nvrtc", "nvrtcVersion", 2), build)
    emulate = f"{checkout} '.[emulate]', to run CUDA bodies without a GPU"
    yield finding("emulator", _run_python(_ZIG), emulate)
    version = "nvshmemx_vendor_get_version_info"
    yield finding("NVSHMEM", _library("nvshmem_host", version, 3))
    yield finding("nvJitLink", _library("nvJitLink", "nvJitLinkVersion", 2))
    yield finding("NCCL", _library("nccl", "ncclGetVersion", 1))


def _library(name: str, function: str, count: int) -> Output:
    output = _run_python(_LOAD.format(name=name, function=function, count=count))
    if not output.text:
        return output
    *numbers, path = output.text.split(" ", count)
    if count == 1:  # NCCL writes 2.28.9 as 22809
        packed = int(numbers[0])
        numbers = [str(packed // 10000), str(packed // 100 % 100), str(packed % 100)]
    return Output(f"{'.'.join(numbers)} {path}")


def _mpi() -> Iterator[Finding]:
    install = "pip install mpi4py mpich, or install the system's MPI"
    library = _run_python(_MPI)
    if library.text:
        version, _, name = library.text.partition(" ")
        name = " ".join(name.split())
        yield Finding("MPI", f"{name}, by mpi4py {version}")
    else:
        yield Finding("MPI", f"cannot be loaded ({library.fault})", install)
    folder = str(Path(sys.executable).parent)  # an MPI wheel installs its mpirun there
    mpirun = shutil.which("mpirun", path=folder) or shutil.which("mpirun")
    if mpirun is None:
        yield Finding("mpirun", "missing", install)
        return
    version = _run([mpirun, "--version"]).text
    starts = "Open MPI" if "Open MPI" in version else "MPICH"
    is_other_mpi = bool(library.text) and (starts == "Open MPI") != (
        "Open MPI" in library.text
    )
    fix = "its ranks would not find each other: use the mpirun of the MPI above"
    yield Finding("mpirun", f"of {starts} ({mpirun})", fix if is_other_mpi else "")


def describe_hosts(environ: Mapping[str, str]) -> Finding:
    """The ranks on this host and what connects hosts, from a launcher's variables."""

    def number(*names: str) -> str:
        return next((environ[name] for name in names if name in environ), "")

    near = number("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
    every = number("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
    here = f"{near} of {every} ranks on this host" if near and every else "one rank"
    transport = environ.get("NVSHMEM_REMOTE_TRANSPORT", "ibrc")
    connected = f"by MPI, GPUs by NVSHMEM's transport {transport}"
    return Finding("hosts", f"{here}; several hosts are connected {connected}")


def _nvls(has_gpus: bool) -> Finding:
    topic = "NVLS"
    if not has_gpus:
        return Finding(topic, "none without GPUs (and never needed)")
    output = _run_python(_ATTRIBUTE.format(number=_MULTICAST_SUPPORTED))
    here = {"1": "present", "0": "not present"}.get(output.text, "unknown")
    disabled = disabled_by(os.environ)
    state = f"disabled by {', '.join(disabled)}" if disabled else "not disabled"
    return Finding(topic, f"{here}, {state} (and never needed)")


def disabled_by(environ: Mapping[str, str]) -> list[str]:
    """The variables that forbid multicast over NVLink to NVSHMEM and NCCL."""
    forbidding = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
    return [f"{k}={v}" for k, v in forbidding.items() if environ.get(k) == v]


def _sharing(listing: str, environ: Mapping[str, str]) -> Finding:
    """How ranks share GPUs under ETC_DIST_SHARE_GPU; LAUNCH_RANKS: of launch/mpirun."""
    topic, num_gpus = "shared GPUs", len(_gpu_rows(listing))
    if not num_gpus:
        return Finding(topic, "allowed, but there are no GPUs")
    output = _run_python(_ATTRIBUTE.format(number=_MPS_ENABLED))
    count = environ.get("LAUNCH_RANKS", "")
    ranks = -(-int(count) // num_gpus) if count.isdigit() else 0
    mps = {"1": True, "0": False}.get(output.text)
    return Finding(topic, describe_sharing(ranks, mps))


def _cache(folder: Path) -> Finding:
    topic = "compile cache"
    cache = Cache(folder)
    fault = cache.fault()
    if fault:
        fix = "set ETC_DIST_CACHE to a folder that only you can write"
        return Finding(topic, f"{folder} cannot be used: {fault}", fix)
    parts = [
        f"{count} {kind} in {size / MIB:.1f} MiB"
        for kind, (count, size) in cache.sizes().items()
    ]
    return Finding(topic, f"{folder}, {', '.join(parts)}")


def _tuning(settings: Settings, listing: str) -> Finding:
    """How tiles of matmuls are chosen on the first GPU."""
    topic = "tile tuning"
    rows = _gpu_rows(listing)
    device = rows[0][1] if rows else ""
    try:
        tuning = find_tuning(settings.tuning, Cache(settings.cache), device)
    except EtcDistError as error:
        return Finding(topic, f"{error.what}: {error.where}", error.fix)
    is_tuned = device in ("", tuning.device)
    return Finding(topic, tuning.show(), "" if is_tuned else "etc-dist tune")


# ---------------------------------------------------------------------------- verdict


def _choose(setting: str, has_gpus: bool) -> tuple[str, str]:
    """The backend of one rank on this machine, empty if there is none, and why."""
    if setting not in ("auto", "cpu", "cuda"):
        return "", f"ETC_DIST_BACKEND={setting} is not auto, cpu or cuda"
    fault = _run_python(_NEEDED).fault or _run_python(_MPI).fault
    if fault:
        return "", f"a package that every backend needs is missing ({fault})"
    if setting == "cpu":
        return "cpu", "ETC_DIST_BACKEND=cpu was set"
    output = _run_python(_OBSTACLE) if has_gpus else Output("no NVIDIA GPU was found")
    obstacle = output.text or output.fault
    if not obstacle:
        return "cuda", "a GPU and all it needs are here"
    if setting == "cuda":
        return "", f"ETC_DIST_BACKEND=cuda needs a GPU, but {obstacle}"
    return "cpu", obstacle
