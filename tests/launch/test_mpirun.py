"""launch/mpirun: readable output, and an end however the ranks behave."""

import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import first_always

MPIRUN = Path(__file__).parents[2] / "launch" / "mpirun"
RANK = """
import os
rank = int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])
"""


def launch(
    source: str, *options: str, ranks: int = 2, text: str = ""
) -> tuple[int, str]:
    """Exit code and output of a Python program on some ranks, which must end long
    before they would by themselves, in a minute. `text` is the standard input."""
    command = [sys.executable, str(MPIRUN), "-n", str(ranks), *options]
    process = subprocess.run(
        [*command, "python", "-c", f"{RANK}\n{source}"],
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=40,
    )
    return process.returncode, process.stdout


def test_lines_bear_their_rank_and_are_never_mixed():
    source = "for line in range(200): print(line, 'x' * 2000)"
    code, output = launch(source)
    lines = output.splitlines()
    assert code == 0
    assert len(lines) == 400
    assert all(re.fullmatch(r"\[rank [01]\] \d+ x{2000}", line) for line in lines)


def test_the_traceback_of_each_rank_is_printed_whole_and_equal_ones_once():
    source = """
def fail(n):
    if n == 0: raise ValueError(f'seen by rank {rank}' + ' alone' * (rank == 2))
    fail(n - 1)
fail(2)
"""
    code, output = launch(source, ranks=3)
    traces = [line for line in output.splitlines() if not line.startswith("[mpirun]")]
    ranks = [line[6] for line in traces]
    assert code == 1
    assert len([1 for rank, next_rank in pairwise(ranks) if rank != next_rank]) == 2
    last = {line[1:7]: line[9:] for line in traces}
    like = [r for r in (0, 1) if "the same traceback as" in last[f"rank {r}"]]
    assert len(like) == 1 and ranks.count(str(like[0])) == 1
    assert last[f"rank {1 - like[0]}"] == f"ValueError: seen by rank {1 - like[0]}"
    assert last["rank 2"] == "ValueError: seen by rank 2 alone"


def test_lines_of_another_encoding_arrive_as_they_are(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    code, output = launch("os.write(1 + rank, b'\\xc3\\xa9\\xe2\\x88\\x9e\\n')")
    assert code == 0
    assert sorted(output.splitlines()) == [f"[rank {r}] \xe9\u221e" for r in (0, 1)]


def test_line_of_many_megabytes_arrives_whole():
    size = 16 << 20
    code, output = launch(f"os.write(2, b'a'); print('x' * {size})", ranks=1)
    assert (code, len(output)) == (0, size + len("[rank 0] \n[rank 0] a\n"))


def test_ranks_form_one_world_of_the_size_asked_for():
    source = (
        "from mpi4py import MPI; print(MPI.COMM_WORLD.size, os.environ['LAUNCH_RANKS'])"
    )
    code, output = launch(source, ranks=3)
    assert code == 0
    assert sorted(output.splitlines()) == [f"[rank {r}] 3 3" for r in range(3)]


def test_ranks_share_the_cores_and_gpus_where_the_option_says_so(monkeypatch):
    monkeypatch.delenv("ETC_DIST_SHARE_GPU", raising=False)
    num_cores = len(os.sched_getaffinity(0))
    share = num_cores // 2 or num_cores
    names = "os.environ['OMP_NUM_THREADS'], os.environ.get('ETC_DIST_SHARE_GPU')"
    source = f"print(len(os.sched_getaffinity(0)), {names})"
    assert f"[rank 0] {share} 1 None\n" in launch(source)[1]
    assert launch(source, "--share-gpu", ranks=1)[1] == f"[rank 0] {num_cores} 1 1\n"


def test_exit_code_of_the_failed_rank_is_ours():
    code, output = launch("exit(3 * rank)")
    assert code == 3
    assert "[mpirun] rank 1 ended with exit code 3" in output


def test_survivors_may_report_before_they_are_ended():
    source = """
import time
if rank == 1:
    os._exit(3)
time.sleep(1)
print('I missed rank 1')
time.sleep(60)
"""
    code, output = launch(source, "--grace", "2")
    assert code == 3
    assert "[rank 0] I missed rank 1" in output
    assert (
        "2 s have passed since rank 1 ended with exit code 3; ending rank 0" in output
    )


def test_signal_that_ended_a_rank_is_named():
    code, output = launch("if rank == 1: os.kill(os.getpid(), 9)")
    assert code == 137
    assert "rank 1 was ended by SIGKILL" in output


def test_hang_is_ended_by_the_time_limit_and_shows_where_ranks_stood():
    source = """
import time
def wait_forever():
    time.sleep(60)
wait_forever()
"""
    code, output = launch(source, "--time-limit", "2")
    assert code == 124
    assert "the time limit of 2 s passed; ending ranks 0, 1" in output
    for rank in (0, 1):
        assert re.search(rf"\[rank {rank}\] .* in wait_forever", output)


def test_rank_deaf_to_signals_is_ended_too():
    source = """
import signal, time
for number in (signal.SIGABRT, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
print(os.getpid())
time.sleep(60)
"""
    code, output = launch(source, "--time-limit", "2", ranks=1)
    assert code == 124
    pid = re.search(r"\[rank 0\] (\d+)", output)[1]
    assert not Path(f"/proc/{pid}").exists()


IN_MPI = """
import time
from mpi4py import MPI
from pathlib import Path
MPI.COMM_WORLD.Barrier()
time.sleep(0.5)
maps = Path('/proc/self/maps').read_text().split()
print('shares', *(word for word in maps if 'mpich_shm_' in word))
"""


def test_rank_that_leaves_in_the_middle_is_named():
    source = f"{IN_MPI}\nif rank == 1: os._exit(0)\ntime.sleep(60)"
    code, output = launch(source, "--grace", "1")
    if "mpich_shm_" not in output:
        pytest.skip("Open MPI ends such a job itself")
    how = "rank 1 ended with exit code 0, but without MPI_Finalize"
    assert f"{how}; rank 0 may continue for 1 s" in output
    assert f"1 s have passed since {how}; ending rank 0" in output
    assert code == 1


def test_ranks_that_wait_in_the_end_for_a_late_one_are_no_failure():
    source = f"{IN_MPI}\nif rank == 1: time.sleep(2.5)"
    code, output = launch(source, "--grace", "0.5")
    assert code == 0
    assert "[mpirun]" not in output


@pytest.fixture
def short_folder():
    """A folder for temporary files, with room for the name of a socket."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def foreign():
    """A file in /dev/shm, as of another running job."""
    path = Path(f"/dev/shm/mpich_shm_test{os.getpid()}_0")
    path.touch()
    yield path
    path.unlink()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(0)", "abort"])
def test_killed_job_leaves_none_of_its_own_shared_files(end, foreign):
    # The last output may be lost with the process that reads it.
    end = end.replace("abort", "time.sleep(0.2); MPI.COMM_WORLD.Abort(3)")
    _, output = launch(f"{IN_MPI}\n{end}\ntime.sleep(60)")
    files = re.findall("/dev/shm/mpich_shm_\\w+", output)
    assert "shares" in output
    assert not any(Path(file).exists() for file in files)
    assert foreign.exists()


def end_in_the_middle(number: int, folder: Path) -> tuple[int, list[Path]]:
    """Exit code of a launcher that gets a signal, and files that its job had."""
    source = f"{RANK}\n{IN_MPI}\nprint('waits')\ntime.sleep(60)"
    command = [sys.executable, str(MPIRUN), "-n", "2", "python", "-c", source]
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment
    ) as launcher:
        lines = []
        while "".join(lines).count("waits") < 2:
            lines.append(launcher.stdout.readline())
            assert lines[-1]
        assert list(folder.glob("ranks-*"))
        launcher.send_signal(number)
    files = re.findall("/dev/shm/mpich_shm_\\w+", "".join(lines))
    return launcher.returncode, [Path(file) for file in files]


def test_job_whose_launcher_is_killed_leaves_no_files(short_folder):
    _, files = end_in_the_middle(signal.SIGKILL, short_folder)
    until = time.monotonic() + 10
    while time.monotonic() < until and any(
        file.exists() for file in [*files, *short_folder.glob("ranks-*")]
    ):
        time.sleep(0.1)
    assert not any(file.exists() for file in files)
    assert not list(short_folder.glob("ranks-*"))


@pytest.mark.parametrize(
    "number", first_always([(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGHUP,)], 2)
)
def test_job_ended_by_a_signal_leaves_no_files(number, short_folder):
    code, files = end_in_the_middle(number, short_folder)
    assert code == 128 + number
    assert not any(file.exists() for file in files)
    assert not list(short_folder.glob("ranks-*"))


def test_job_whose_output_is_not_read_is_ended():
    program = "import time\nwhile True: print('line'); time.sleep(0.01)"
    command = [sys.executable, str(MPIRUN), "-n", "2", sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        assert launcher.stdout.readline().endswith("line\n")
        launcher.stdout.close()
        assert not launcher.stderr.read()
    assert launcher.returncode == 128 + signal.SIGPIPE


def test_long_folder_for_temporary_files_is_no_obstacle(monkeypatch, tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    assert launch("print(rank)", ranks=1)[:2] == (0, "[rank 0] 0\n")


def test_bus_error_names_the_shared_memory():
    _, output = launch("import time; os.kill(os.getpid(), 7)", ranks=1)
    assert re.search(r"was ended by SIGBUS \(/dev/shm is [\d.]+ MiB;", output)


def test_tag_that_a_line_bears_already_is_not_repeated():
    _, output = launch("print(f'[rank {rank}] aborts'); print('[rank 7] is read')")
    assert sorted(output.splitlines()) == [
        f"[rank {rank}] {text}"
        for rank in range(2)
        for text in ("[rank 7] is read", "aborts")
    ]


@pytest.mark.parametrize("code", [7, 256])
def test_abort_ends_all_ranks_and_is_a_failure(code):
    """mpirun's exit code has the low 8 bits alone, 0 of 256."""
    source = f"""
from mpi4py import MPI
import time
if MPI.COMM_WORLD.rank == 1:
    MPI.COMM_WORLD.Abort({code})
time.sleep(60)
"""
    assert launch(source)[0] == (code % 256 or 1)


def test_ranks_without_an_exit_code_are_named(monkeypatch, tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\nexit 0\n")
    mpirun.chmod(0o755)
    monkeypatch.setenv("LAUNCH_MPIRUN", str(mpirun))
    assert launch("") == (1, "[mpirun] ranks 0, 1 ended without an exit code\n")


def test_rank_0_reads_the_standard_input_and_the_others_an_empty_one():
    source = "import sys; print(sys.stdin.read().split())"
    code, output = launch(source, ranks=3, text="one two\n")
    expected = [f"[rank {r}] {[]}" for r in (1, 2)]
    assert code == 0
    assert sorted(output.splitlines()) == ["[rank 0] ['one', 'two']", *expected]


@pytest.mark.parametrize("reads", [False, True])
def test_rank_0_may_read_a_large_input_late_or_never(reads):
    source = "import sys, time; time.sleep(1)"
    source += "\nif rank == 0: print(len(sys.stdin.read()))" * reads
    code, output = launch(source, text="x" * 1_000_000)
    assert (code, output) == (0, "[rank 0] 1000000\n" * reads)


def test_interrupt_after_a_failure_ends_the_others():
    source = f"{RANK}\nimport time\nprint(rank)\nif rank: raise SystemExit(3)"
    source += "\ntry: time.sleep(60)\nfinally: print('ends')"
    command = [sys.executable, str(MPIRUN), "-n", "2", "--grace", "60"]
    with subprocess.Popen(
        [*command, "python", "-c", source], stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert "rank 1 ended with exit code 3" in launcher.stderr.readline()
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(20) == 3


def test_output_to_a_full_device_ends_the_job_with_a_line():
    command = [sys.executable, str(MPIRUN), "-n", "2", "echo", "line"]
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=40
        )
    assert process.returncode == 1
    assert process.stderr == (
        "[mpirun] the job is ended: [Errno 28] No space left on device\n"
    )


@pytest.mark.parametrize("closed", ["0", "1", "2"])
def test_a_closed_output_is_refused_and_a_closed_input_is_empty(closed):
    command = f"exec {sys.executable} {MPIRUN} -n 2 cat {closed}>&-"
    process = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=40
    )
    assert process.returncode == (0 if closed == "0" else 2)
    assert ("is closed" in process.stderr) is (closed == "1")


IN_FINALLY = """
import time
try:
    print("waits")
    time.sleep(60)
finally:
    print("begins")
    time.sleep({seconds})
    print("ends")
"""


@pytest.mark.parametrize(
    ("seconds", "interrupts", "ends"), [(0.3, 1, 2), (60, 1, 0), (60, 2, 0)]
)
def test_interrupt_gives_ranks_time_and_a_second_one_ends_them(
    seconds, interrupts, ends
):
    source = IN_FINALLY.format(seconds=seconds)
    command = [sys.executable, str(MPIRUN), "-n", "2", "python", "-c", source]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as launcher:
        lines = [launcher.stdout.readline() for _ in range(2)]
        began = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        lines += [launcher.stdout.readline() for _ in range(2)]
        if interrupts == 2:
            launcher.send_signal(signal.SIGINT)
        output = launcher.stdout.read()
    assert ["begins" in line for line in lines] == [False, False, True, True]
    assert output.count("ends") == ends
    assert launcher.returncode == 128 + signal.SIGINT
    if interrupts == 1 and not ends:
        assert time.monotonic() - began >= 2.0


@pytest.mark.parametrize(
    ("seconds", "signals", "code"), [(0.3, 1, 0), (60, 1, 143), (60, 2, 143)]
)
def test_ranks_that_handle_sigterm_have_time_to_end(seconds, signals, code):
    source = f"""
import signal, time
is_ending = False
def handle(*_):
    global is_ending
    is_ending = True
signal.signal(signal.SIGTERM, handle)
print("waits")
while not is_ending:
    time.sleep(0.01)
print("drains")
time.sleep({seconds})
"""
    options = ["-n", "2", "--drain", "1"]
    command = [sys.executable, str(MPIRUN), *options, "python", "-c", source]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        lines = [launcher.stdout.readline() for _ in range(2)]
        began = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        lines += [launcher.stdout.readline() for _ in range(2)]
        if signals == 2:
            launcher.send_signal(signal.SIGTERM)
    assert ["drains" in line for line in lines] == [False, False, True, True]
    assert launcher.returncode == code
    if code and signals == 1:
        assert time.monotonic() - began >= 1.0


def test_interrupt_before_any_rank_has_begun_ends_the_job_at_once(tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo waits; sleep 60; }\n')
    mpirun.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, str(MPIRUN), "-n", "1", "true"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"LAUNCH_MPIRUN": str(mpirun)},
    ) as launcher:
        assert launcher.stderr.readline() == "[mpirun] waits\n"
        began = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(20) == 128 + signal.SIGINT
    assert time.monotonic() - began < 2.0


def test_command_that_does_not_exist_is_named():
    process = subprocess.run(
        [sys.executable, str(MPIRUN), "-n", "1", "no-such-program"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 127
    assert "[rank 0] cannot start no-such-program" in process.stderr


def test_a_rank_that_begins_after_a_signal_gets_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(MPIRUN.parent))
    launcher = runpy.run_path(str(MPIRUN))
    job = launcher["Job"](SimpleNamespace(hostfile=None), "", {})
    job.order(launcher["TERMINATE"])
    kind, address = socket.AF_UNIX, str(tmp_path / "job")
    with socket.socket(kind) as listener, socket.socket(kind) as rank:
        listener.bind(address)
        listener.listen()
        rank.connect(address)
        job.accept(listener)
        rank.settimeout(5)
        with job.selector, job.connections[0].socket:
            assert rank.recv(16) == launcher["TERMINATE"]
