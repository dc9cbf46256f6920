"""Mutations of the kernels: the emulator detects each missing wait, barrier or fence,
and each changed computation."""

from __future__ import annotations

import ctypes
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import EtcDistError
from etc_dist.models.sampling import Sampling
from etc_dist.runtime.build import kernels_folder
from etc_dist.runtime.cpu import simulate
from tests.emulate.aborted import check_skipped, sent_in_vain
from tests.emulate.cases import check
from tests.emulate.matrix import CASES, Case
from tests.functions.test_route_rows import FEW, check_routes, routed, routed_rows
from tests.functions.test_sample_column import sampled, sampled_given
from tests.models.test_decoder import check_ids, decoder, decoder_step


def some_routes() -> Any:
    return routed_rows(np.random.default_rng(1), FEW, 9, 16, 0, 0)


def check_some_routes(program: Emulator, given: Any, dims: dict[str, int]) -> None:
    [found] = program.run([given], dims)
    check_routes(found, FEW, given, dims)


def some_samples() -> Any:
    x = np.random.default_rng(2).standard_normal((4, 600))
    return sampled_given(x, [Sampling(1.0, 5, 0.9, seed=n) for n in range(4)])


def check_equal(program: Emulator, given: Any, dims: dict[str, int]) -> None:
    """The CUDA bodies give what the NumPy bodies give."""
    [expected] = simulate(program.plan, [given], dims).outputs
    [found] = program.run([given], dims)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


MUTATED = {
    **CASES,
    "queue": replace(CASES["moe"], schedule="dynamic"),
    "aborted": Case(partial(sent_in_vain, 2, wanted=2), tuple),
    "decoder": Case(decoder, decoder_step),
    "routes": Case(partial(routed, 1, routing=FEW), some_routes),
    "samples": Case(partial(sampled, 1, width=64), some_samples),
}
CHECKS = {
    "aborted": check_skipped,
    "decoder": check_ids,
    "routes": check_some_routes,
    "samples": check_equal,
}
LOADER_WAITS = "wait_mbarrier(run, Ring::empty(base_, oldest), Ring::parity(oldest))"
GATHERER_WAITS = f"""__all_sync(
                 ~0u, {LOADER_WAITS})"""
NOTIFIES_EACH = (
    "notify_and_release_each<Call>(run, Call::at(g, t), Call::kCluster, has_one);"
)
RELEASE = "ptx::store_release(word, run.epoch);"
SCRATCH_FENCE = (
    "ptx::fence_proxy_async();  "
    "// generic reads of the scratch before the next bulk store"
)
ROWS_ARE_READ = "ptx::named_barrier<128>(2 + wg);  // the rows have been read"
BROKEN = {
    # file: case: a statement or an expression there: its replacement
    "functions/mainloop": {
        "moe": {
            "!stages.wait_full(run)": "false",
            "ptx::wgmma_wait<1>();": "",
            "multiply(at, k);": "if (k != 2 || threadIdx.x / 32 != 1) multiply(at, k);",
            "ptx::fence_proxy_async_shared();": "",
            "stages.count() - 2": "stages.count() - 1",
        },
    },
    "worker/stage_ring": {
        "moe": {
            LOADER_WAITS: "true",
            GATHERER_WAITS: "true",
        },
        "stages": {
            "tail < head_ ? is_after || is_before : is_after && is_before": "true",
            "n_ - oldest_ < Ring::kSlots": "true",
        },
        "mixed": {"head + bytes <= kBytes ? head : 0": "head"},
        "shared": {"Ring::multicasts(run)": "false"},
    },
    "worker/calls": {
        "loops": {
            "turn * Call::units(g) + unit": "unit",
            "unit - inner * period": "unit",
            "turn * Turns::turns(g) + inner": "turn",
        },
    },
    "worker/tensor_lane": {
        "loops": {
            "member < size ? group * size + member : -1": "group * size + member"
        },
        "ahead": {"stages.has_room_ahead(all.bytes)": "true"},
        "gathered": {"stages.skip(FunctionOf<Call>::stages(run_, size_of(a)));": ""},
        "shared": {"published > 0 || !loads_at_once<Call>()": "false"},
        "moe": {
            "ptx::fence_proxy_async_global();": "",
            "    ptx::named_barrier<kComputeThreads>(1);": "",
        },
        "mixed": {"going = wait_buffer(counters);": ""},
        "sent": {"wait_peers<Program, Call>(run_, c, who, entered) && going": "going"},
    },
    "functions/grouped_compute": {
        "moe": {"      ptx::named_barrier<128>(2 + wg);": ""},
    },
    "functions/grouped_matmul": {
        "moe": {"wait_mbarrier(run, matmul.stored(0), round & 1)": "true"},
    },
    "functions/tile_sums": {
        "exchanged": {
            "!wait_mbarrier<true>(run, ready(), n & 1)": "false",
            "!wait_mbarrier(run, arrived(), n & 1)": "false",
            "ptx::mbarrier_arrive_cluster_release": "ptx::mbarrier_arrive_cluster",
        },
        "gated pairs": {
            "return ptx::named_barrier_any<128>(2 + wg, lost);": "return lost;",
        },
        "exchanged columns": {
            "!wait_mbarrier<true>(run, ready(), n & 1)": "false",
            "!wait_mbarrier(run, arrived(), n & 1)": "false",
            "return ptx::named_barrier_any<128>(2 + wg, lost);": "return lost;",
        },
    },
    "functions/rows_tile": {
        "epilogue": {
            "__syncwarp();  // the rows are complete": "",
            "__syncwarp();  // the rows have been read": "",
        },
    },
    "functions/swapped_tile": {
        "swapped epilogue": {
            f"if (pass > 0 || f > 0) {ROWS_ARE_READ}": "",
            "ptx::named_barrier<128>(2 + wg);  // the rows are complete": "",
        },
        "turns": {
            "if (wg == 0 && !kExchanges) ptx::named_barrier<128>(2);": "",
            "if (first > 0) ptx::named_barrier<256>(1);": "",
            "ptx::named_barrier_any<256>(1, lost)": "lost",
        },
        "gated pairs": {
            "ptx::named_barrier<128>(2);  // up's sums are in the buffer": "",
        },
        "gated warps": {
            "ptx::named_barrier<128>(2);  // up's sums are in the buffer": "",
        },
        "gated groups": {
            "if (wg == 0 && !kExchanges) ptx::named_barrier<128>(2);": "",
            "if (first > 0) ptx::named_barrier<256>(1);": "",
            "ptx::named_barrier_any<256>(1, lost)": "lost",
        },
    },
    "worker/admission": {"shared": {"!ptx::mbarrier_try_wait(barrier_, 0)": "false"}},
    "functions/rms_norm": {"decoder": {"task.sync();": ""}},
    "functions/check_rows": {"decoder": {"task.sync();": ""}},
    "functions/attend": {
        "decoder": {"task.sync();": "", "        task.sync();\n": ""},
    },
    "worker/worker": {
        "few": {"ptx::named_barrier<kWorkerThreads>(kInitBarrier);": ""},
        "moe": {"if (tensor.sends()) ptx::cluster_barrier();": ""},
        "sum, few rows": {
            RELEASE: RELEASE.replace("release", "relaxed"),
        },
        "aborted": {"run.aborted()": "false"},
    },
    "functions/choose_experts": {
        "moe": {
            "task.sync();  // scratch is cleared": "",
            "    task.sync();\n": "",
        },
    },
    "worker/ticket_channel": {
        "moe": {
            "ptx::mbarrier_arrive_cluster(empty(), 0);": "",
            "base_ + 16 + 4 * (n & 1)": "base_ + 16",
        },
    },
    "worker/task": {
        "moe": {"      ptx::fence_acq_rel<Call::kNotifiesPeers>();": ""},
        "queue": {
            "if (ptx::lane() == 0) ptx::fence_acq_rel<Call::kNotifiesPeers>();": "",
        },
    },
    "worker/transfer_lane": {
        "moe": {"    __syncwarp();  // lane 0's acquire covers the whole warp": ""},
    },
    "functions/list_rows": {
        "moe": {
            "task.sync();  // before it is written again": "if (warp) task.sync();",
        },
        "moe, many tokens": {"if (w < warp) row += of_warp;": ""},
    },
    "functions/combine_rows": {
        "moe": {"ptx::load16_last(from)": "ptx::load16_once_if(true, from)"},
    },
    "worker/work_ring": {
        "moe": {"ptx::mbarrier_try_wait(full(n), n / kEntries & 1)": "true"},
    },
    "functions/route_rows": {"routes": {"task.sync();": ""}},
    "functions/sample_column": {"samples": {"task.sync();": ""}},
    "functions/plan_tiles": {"moe": {"    task.sync();": ""}},
    "functions/score_experts": {"moe": {"    task.sync();": ""}},
    "queue/pop": {
        "queue": {
            "ptx::load_acquire<kPeersPush<Program>>(slot)": "ptx::load_relaxed(slot)",
        },
    },
    "queue/release": {"queue": {"  fence_groups<Call>(run);": ""}},
    "queue/push": {
        "queue": {
            "ptx::store_relaxed(slots + u64(first + k) * 4, kEmptySlot);": "",
            NOTIFIES_EACH: "",
        },
        "counts": {"        ptx::fence_acq_rel<false>();": ""},
    },
    "worker/empty_run": {
        "queue": {
            "notify_and_release_each<Call>(run, c, Call::kCluster, own < end);": "",
            "WorkItem::kRun | u32(drawn - ticket)": "0",
        },
    },
    "functions/row_pairs": {
        "few": {"    task.sync();": ""},
        "wide": {"task.sync();  // before they are written again": ""},
    },
    "functions/matmul": {
        "scratch": {"emptied(threadIdx.x >> 7)": "emptied(0)"},
        "sum": {
            "ptx::commit_stores();": "",
            "ptx::wait_stores_read<1>();": "",
            "ptx::wait_stores_read<0>();": "",
            "ptx::wait_stores<0>();": "",
            "ptx::fence_proxy_async_shared();": "",
            "wait_mbarrier(run, matmul.sent(images & 1), parity)": "true",
            SCRATCH_FENCE: "",
        },
    },
    "event/wait": {
        "sum, few rows": {
            "ptx::load_acquire<true>(address)": "ptx::load_relaxed(address)",
            "ptx::load_acquire<true>(run.self() + u64(rank) * 4)": "run.epoch",
        },
    },
}
MUTATIONS = [
    (case, file, text, instead)
    for file, cases in BROKEN.items()
    for case, texts in cases.items()
    for text, instead in texts.items()
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, with all mutations; the variable `mutation` selects one."""
    folder = tmp_path_factory.mktemp("broken") / "kernels"
    shutil.copytree(kernels_folder(), folder)
    first = folder / "common" / "integers.cuh"
    first.write_text(f'{first.read_text()}\nextern "C" {{\nint mutation = 0;\n}}\n')
    for number, (_, file, text, instead) in enumerate(MUTATIONS, 1):
        path = folder / f"{file}.cuh"
        before, found, after = path.read_text().partition(text)
        assert found, f"{file} has no {text}"
        is_broken = f"mutation == {number}"
        if ";" in text:
            either = f"if ({is_broken}) {{\n{instead}\n}} else {{\n{text}\n}}"
        else:
            either = f"({is_broken} ? {instead} : {text})"
        path.write_text(before + either + after)
    return folder


HANDS_OVER = re.compile(
    r"\b(task\.sync|__syncwarp|named_barrier\w*|cluster_(barrier|arrive|wait)|"
    r"mbarrier_(try_wait|arrive)\w*|store\d*_async\w*|wait_(mbarrier|event|peer|stores)\w*|"
    r"fence_\w+|fetch_add_ac\w+|load_acquire|store_release|wgmma_wait|notify_event)[<(]"
)
"""Functions that order accesses of one thread before those of another."""


def code_of(header: Path) -> str:
    """Without comments."""
    return re.sub(r"//.*", "", header.read_text())


def test_each_header_that_hands_over_is_broken():
    headers = kernels_folder().glob("*/*.cuh")
    ours = {p for p in headers if p.parent.name != "ptx"}  # the emulator has its own
    files = {f"{p.parent.name}/{p.stem}" for p in ours if HANDS_OVER.search(code_of(p))}
    assert files <= set(BROKEN)


def _numbered() -> list[Any]:
    """The mutations; all but the first of each header are exhaustive."""
    cases, seen = [], set[str]()
    for number, (case, file, *_) in enumerate(MUTATIONS, 1):
        marks = [pytest.mark.exhaustive] if file in seen else []
        cases.append(pytest.param(number, id=f"{case}-{file}", marks=marks))
        seen.add(file)
    return cases


def run(name: str, number: int, folder: Path, kernels: Path) -> None:
    """Check a case with one mutation, or with none for 0."""
    case = MUTATED[name]
    program = Emulator(
        case.graph(), schedule=case.schedule, folder=folder, kernels=kernels
    )
    ctypes.c_int.in_dll(program.library, "mutation").value = number
    CHECKS.get(name, check)(program, *case.given())


@pytest.mark.parametrize("name", ["decoder", "routes", "samples"])
def test_what_is_not_broken_gives_the_reference(name, folder, kernels):
    run(name, 0, folder, kernels)


# Sums of uninitialised memory may have any value.
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("number", _numbered())
def test_what_is_broken_shows(folder, kernels, number):
    with pytest.raises((AssertionError, EtcDistError)):
        run(MUTATIONS[number - 1][0], number, folder, kernels)
