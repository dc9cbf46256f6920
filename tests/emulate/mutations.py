"""Mutations of the kernels, of which a variable of a compiled program selects one."""

from __future__ import annotations

import shutil
from pathlib import Path

from etc_dist.runtime.build import kernels_folder

LOADER_WAITS = "wait_mbarrier(run, Ring::empty(base, n), Ring::parity(n))"
GATHERER_WAITS = (
    "__all_sync(\n                 ~0u, "
    "wait_mbarrier(run, Ring::empty(base_, oldest), Ring::parity(oldest)))"
)
TORN = (
    "ptx::TwoWords{u64(ptx::load_relaxed(source)) | "
    "u64(ptx::load_relaxed(source + 4)) << 32, ptx::load_words(source).second}"
)
"""A word that is loaded by halves, its data first."""
LAST_WAIT = (
    "wait_some<Program, Call>(\n      state.run, unit.coord, Call::kWaits - 1, "
    "Call::kWaits, unit.waiter)"
)
RELEASE = "ptx::store_release(word, run.epoch);"
ROWS_ARE_READ = "ptx::named_barrier<128>(2 + wg);  // the rows have been read"
BROKEN = {
    # file: case: a statement or an expression there: its replacement
    "functions/mainloop": {
        "moe": {
            "!stages.wait_full(run)": "false",
            "ptx::wgmma_wait<1>();": "",
            "multiply(place, k);": (
                "if (k != 2 || threadIdx.x / 32 != 1) multiply(place, k);"
            ),
            "ptx::fence_proxy_async_shared();": "",
            "stages.count() - 2": "stages.count() - 1",
        }
    },
    "worker/stage_ring": {"moe": {LOADER_WAITS: "true", GATHERER_WAITS: "true"}},
    "worker/stage_placer": {
        "stages": {
            "tail < head_ ? is_after || is_before : is_after && is_before": "true",
            "minimum(Ring::kBytes / bytes, Ring::kSlots)": "Ring::kBytes / bytes",
        },
        "short stages": {"num_stages_ - oldest_ < Ring::kSlots": "true"},
        "mixed": {
            "head + bytes <= kBytes ? head : 0": "head",
            "if (full_ > 0) tail_ = begins_.get(oldest_);": "",
        },
    },
    "worker/calls": {
        "loops": {
            "turn * Call::units(g) + unit": "unit",
            "unit - inner * turns.num_units": "unit",
            "turn * turns.num_turns + inner": "turn",
        }
    },
    "worker/tensor_lane": {
        "gathered": {"stages.skip(FunctionOf<Call>::stages(run_, item.size));": ""},
        "moe": {"    ptx::named_barrier<kComputeThreads>(1);": ""},
        "scratch": {"return meet(is_going);": "return is_going;"},
        "sent": {
            "wait_peers<Program, Call>(run_, coord, who, entered) && is_going": (
                "is_going"
            )
        },
    },
    "worker/unit": {"moe": {"ptx::fence_proxy_async_global();": ""}},
    "worker/ready/ahead": {
        "ahead": {"stages.has_room_ahead(all.bytes)": "true"},
        "ahead, loaded": {"    if (!unit.wait(n)) return false;": ""},
    },
    "worker/ready/counted": {
        "ahead, counted": {
            "if (unit.is_going) unit.is_going = load_ahead(unit);": "",
        },
        "moe": {
            "Call::is_surplus(unit.coord, count)": "false",
            "Call::block_end(run.g, unit.task) - unit.task - 1": (
                "Call::block_end(run.g, unit.task) - unit.task"
            ),
        },
    },
    "worker/ready/early": {"few": {LAST_WAIT: "true"}},
    "worker/ready/pending": {
        "loops": {
            "cache.update(n, event) && !wait_event(run, event, waiter)": "false",
            "if (n >= pending.num_events) break;": "if (n > 0) break;",
        },
        "early": {"early_event = Call::kWaits - 1;": "early_event = 0;"},
    },
    "worker/ready/prepared": {
        "shares": {
            "!wait_event_once<Program, Call>(run, coord, kLast, waiter, events)": (
                "false"
            ),
            "fence_loads<Call>(events);": "",
        }
    },
    "functions/gather_rows": {
        "moe, scaled": {"shape.box_w<kRowBytes>()": "shape.box_w()"},
        "moe": {"ptx::mbarrier_arrive_copied(stage.full);": ""},
        "moe of two, by expert": {"stages.skip(all);": ""},
    },
    "functions/wide_tile": {
        "moe": {ROWS_ARE_READ: ""},
    },
    "functions/tile_matmul": {
        "ahead": {"loader.is_begun()": "false"},
        **{
            f"stored on ranks, {k} of k": {
                "kWritesPeers && stage_idx == before && !started()": "false",
            }
            for k in (200, 904)
        },
        "moe": {"wait_mbarrier(run, matmul.stored(0), parity)": "true"},
        "float8": {
            "w.start[0] & i32(kBlockDepth - 1)": "0",
            "w.start[0] / i32(kBlockDepth)": "0",
        },
    },
    "functions/tile_parts": {
        "parts, tall": {
            "part + next < count": "part + next + 1 < count",
            "j * kGroupBytes": "(j ^ 1) * kGroupBytes",
        },
    },
    "functions/sum_tile_parts": {
        "gated parts, rows": {"u32(up - first)": "0u"},
        "sums on ranks": {
            "!started()": "false",
            "peers_of<Call>(run, c)": "0u",
        },
    },
    "functions/scaled_weights": {
        "moe, scaled": {
            "is_up ? place.apart : 0": "0",
            "if (is_gathered) ptx::fence_proxy_async_shared();": "",
        },
        "scaled": {
            "!stages.wait_full(run)": "false",
            "is_next & !stages.has_next()": "false",
            "__syncwarp();  // all lanes have read it": "",
            "n % kLanes == 0": "false",
            "block < num_blocks": "block + 1 < num_blocks",
            "kHasBlocks ? block * sizeof(Element) : 0": "0",
            "u64(u32(of_w) >> Weights::kShift)": "u64(u32(of_w) >> 8)",
            "ptx::wgmma_wait<1>();": "",
            "ptx::load_shared2(address + 8)": "ptx::load_shared2(address)",
            "(box * 4 + step) * 16": "step * 16",
            "apart + block": "block",
        },
        "scaled, gated": {
            "i % 4 < 2 ? scale.x : scale.y": "scale.x",
            "is_up ? place.up : place.gate": "place.gate",
            "is_up ? column - gate_columns : column": "column",
        },
        "scaled, turns": {
            "ptx::lane() % kLanes * turn": "ptx::lane() % kLanes",
            "address ^ unit * 16": "address",
            "(quarter * 2 + half) ^ row": "quarter * 2 ^ row",
            "unit * 32 + n % 2 * 16": "n % 2 * 16",
            "n * w.apart": "0",
        },
        "scaled, tall": {
            "half * kHalf * 128 / 16": "0",
            "box * reader.box_x / 16": "0",
            "i32(box)": "1",
        },
    },
    "functions/wgmma_turns": {
        "float8": {"kTurnBarrier + (wg ^ 1)": "kTurnBarrier + wg", "wg == 1": "false"}
    },
    "functions/scaled_operands": {
        "float8": {
            "!stages.wait_full(run)": "false",
            "ptx::wgmma_wait<0>();": "",
            "kIsLast && !is_lost": "kFirst == 0 && !is_lost",
            "place / 16 + kFirst * 128 / 16": "place / 16",
            "b + 4": "b",
            "n % kLanes == 0": "n == 0",
            "block < end_block": "block + 1 < end_block",
            "minimum(n, last)": "n",
            "row_of_x(row + 8)": "row_of_x(row)",
            "scales.w + scales.w_pitch": "scales.w",
            "(kFirst + 2 * i) / kStep * kStep < end": "kFirst + 2 * i <= end",
            "rows.y * scale_pair.x": "rows.x * scale_pair.x",
            "rows.x * scale_pair.y": "scale_pair.y",
            "__fmaf_rn(upper, sums[i], total[0])": "upper * sums[i]",
        },
        "float8, gated": {
            "kFirst == 0 ? w.of(n) : up.of(n)": "w.of(n)",
            "kHasUp && is_gated ? kFirst : 0": "0",
        },
    },
    "functions/push_scaled_rows": {
        "float8, gather": {
            "push_region<0, 2>(task);": "",
            "push_region<1, 3>(task);": "",
        },
    },
    "functions/quantize_rows": {
        "float8": {
            "fmaxf(fabsf(pair.x), fabsf(pair.y))": "fabsf(pair.x)",
            "(lane & step) != 0": "(lane & step) == 0",
            "lane % kLanes + lane / kLanes": "lane % kLanes",
            "__fdiv_rn(group_most, kMostCode)": "group_most",
        },
    },
    "common/types": {
        "scaled": {
            "ptx::upper_halves(pair.x, pair.y)": "ptx::upper_halves(pair.y, pair.x)"
        }
    },
    "functions/rows_tile": {
        "epilogue": {
            "__syncwarp();  // the rows are complete": "",
            "__syncwarp();  // the rows have been read": "",
        }
    },
    "functions/swapped_sums": {"tall": {f"if (f > 0) {ROWS_ARE_READ}": ""}},
    "functions/swapped_tile": {
        "moe, narrow tiles": {
            "if (kMayBeLeft || first > 0) ptx::named_barrier<256>(1);": ""
        },
        "swapped epilogue": {
            f"if (pass > 0 || f > 0) {ROWS_ARE_READ}": "",
            "ptx::named_barrier<128>(2 + wg);  // the rows are complete": "",
        },
        "turns": {
            "if (wg == 0) ptx::named_barrier<128>(2);": "",
            "if (kMayBeLeft || first > 0) ptx::named_barrier<256>(1);": "",
            "ptx::named_barrier_any<256>(1, is_lost)": "is_lost",
        },
        "gated warps": {
            "ptx::named_barrier<128>(2);  // up's sums are in the buffer": ""
        },
        "gated groups": {
            "if (wg == 0) ptx::named_barrier<128>(2);": "",
            "if (kMayBeLeft || first > 0) ptx::named_barrier<256>(1);": "",
            "ptx::named_barrier_any<256>(1, is_lost)": "is_lost",
        },
    },
    "worker/admission": {
        "moe": {"!ptx::mbarrier_try_wait(barrier_, 0)": "false"},
        "turns": {"!ptx::mbarrier_try_wait(initialized(), 0)": "false"},
    },
    "functions/flags": {
        "flagged": {
            "flags.store16(targets[c] + column * 4, words)": (
                "flags.store16(targets[0] + column * 4, words)"
            ),
            "sum.add(is_needed[r] ? part[r] : own_words)": "sum.add(part[r])",
        },
        "flagged norm": {
            "sums[i].add(is_needed[r] ? part[r] : own_words)": "sums[i].add(part[r])",
            "parts + own_column * 4": "parts",
        },
    },
    "functions/sum_ranks": {"mlp on tiles": {"r == task.g.rank": "r > task.g.rank"}},
    "functions/share_sum": {
        "reduced": {
            "source + p * stride": "source + (p ^ 1) * stride",
            "first += kUnroll * kStep": "first += 2 * kUnroll * kStep",
            "if (column >= columns) break;": "if (column > columns) break;",
            "each_copy<c + 1>(task, targets);": (
                "if (c > 0) each_copy<c + 1>(task, targets);"
            ),
            "sum[2 * i] += pair.x, sum[2 * i + 1] += pair.y;": "sum[2 * i] += pair.x;",
        }
    },
    "functions/push_tile": {
        "sum in strips": {"begin -= bytes;": "begin = 0;", "++row;": "row += 2;"}
    },
    "functions/rms_norm": {"norms": {"task.sync();": ""}},
    "functions/attend": {
        "attention": {
            "ptx::named_barrier<128>(2 + wg);  // the list's query is complete": "",
            "Query::capped((a[0][i] + a[1][i]) * Call::kScale)": (
                "(a[0][i] + a[1][i]) * Call::kScale"
            ),
        },
        "many shares": {"clear_slots();": ""},
        "sinks": {"weights += sink_weight(sink, largest);": ""},
        "shares": {
            "!stages.wait_full(run)": "false",
            "ptx::named_barrier<128>(2 + wg);  // the sums have been read": "",
            "__syncwarp();  // the query is complete": "",
            "ptx::named_barrier_any<128>(2 + wg, is_lost)": "is_lost",
            "v[2] & high": "v[2]",
            "n % 2 == 0": "n % 2 == 1",
            "n < Of::kMostStages": "true",
            "if (!is_ready) has_failed = !ready();": (
                "if (!is_ready) has_failed = false;"
            ),
        },
    },
    "functions/attend_prompt": {
        "prompts": {
            "__syncwarp();  // the chunks in registers are complete": "",
            "__syncwarp();  // they have been read": "",
            "__syncwarp();  // the others are complete": "",
            "!stages.wait_full(run)": "false",
            "value & Query::mask(first, begin, end)": "value",
            "end >= kAtOnce": "true",
            "start >= inner.begin": "true",
            "start + kAtOnce <= inner.end": "true",
            "source.row(source.rows - 1)": "row",
            "own_pair(n)": "own_pair(0)",
            "factor[i / 2]": "factor[i % 2]",
        },
    },
    "functions/attend_query": {
        "attention": {"(!Call::kHasSpan || position >= begin)": "true"}
    },
    "functions/rotary": {"attention": {"value += kGainOffset;": ""}},
    "functions/paged_rows": {"attention": {"maximum(0, length - window)": "0"}},
    "functions/post_norm": {
        "post norm": {
            "    task.sync();\n": "",
            "task.sync();  // the sums of warps have been read": "",
        }
    },
    "functions/heads_norm": {"heads norm": {"    task.sync();\n": ""}},
    "functions/attend_stages": {
        "shares": {
            "source.row(row + 1)": "source.row(row)",
            "(stage + 1) * kStage <= num_stored": "stage * kStage <= num_stored",
            "load_pages(ahead, group + 1)": "load_pages(ahead, group)",
            "load_pages(ahead, first_page() / kGroup + 1);": "",
        }
    },
    "functions/combine_slices": {
        "shares": {
            "if (!ready()) return;": "",
            "2 * (first + n) - 1": "first + n",
        },
        "sinks": {"weight += sink_weight(sink, most);": ""},
    },
    "functions/plan_shares": {
        "shares": {
            "task.sync();  // the stages of rows are known": "",
            "task.sync();  // so are those before them": "",
            "task.sync();  // the bounds are known": "",
            "ptx::named_barrier_any<kThreads>(1, is_long)": "is_long",
            "task.sync();  // no page is marked": "",
            "task.sync();  // all are marked": "",
            "~ptx::warp_max(~u32(num_stored))": "u32(num_stored)",
        },
        "prompts": {
            "task.sync();  // no row begins a run": "",
            "task.sync();  // all runs are known": "",
            "task.sync();  // so are all blocks": "",
            "extent.w == before.w": "true",
        },
    },
    "worker/worker": {
        "few": {"ptx::named_barrier<kWorkerThreads>(kInitBarrier);": ""},
        "sum, few rows": {RELEASE: RELEASE.replace("release", "relaxed")},
        "aborted": {
            "ptx::named_barrier_any<kOtherWarps * 32>(kAgreeBarrier, is_aborted)": (
                "false"
            )
        },
    },
    "functions/choose_experts": {
        "moe": {"task.sync();  // scratch is cleared": "", "    task.sync();\n": ""},
        "many experts": {"choose<kAtOnce>(task, first)": "choose<kAtOnce>(task, 0)"},
    },
    "functions/router": {
        "groups": {
            "(group_bits >> group & 1) == 0": "false",
            "lane == winner ? second : best": "second",
            "value += __uint_as_float(bits)": "value += 0.0f",
            "kIsSoftmax ? 0.0f : 1e-20f": "1.0f",
            "weight * Task::kScale": "weight",
        },
        "routes": {"kByLogit ? sum : best + logf(sum)": "sum / 2"},
        "many experts": {"best + logf(sum)": "best"},
    },
    "worker/task": {
        "moe": {"      ptx::fence_acq_rel<Call::kNotifiesPeers>();": ""},
        "conditions of dims": {
            "Call::kNotifiesWhen && event.index == kNoElement": "false"
        },
        "queue": {
            "if (ptx::lane() == 0) ptx::fence_acq_rel<Call::kNotifiesPeers>();": ""
        },
    },
    "worker/transfer_lane": {
        "moe": {"    __syncwarp();  // lane 0's acquire covers the whole warp": ""}
    },
    "functions/list_rows": {
        "moe": {
            "task.sync();  // before it is written again": "if (warp) task.sync();"
        },
        "moe, many tokens": {"if (w < warp) row += of_warp;": ""},
    },
    "functions/combine_rows": {
        "moe": {"ptx::load16_last(source)": "ptx::load16_once_if(true, source)"}
    },
    "worker/work_ring": {
        "moe": {
            "ptx::mbarrier_try_wait(full(item_idx), item_idx / kEntries & 1)": "true"
        }
    },
    "functions/route_rows": {"routes": {"task.sync();": ""}},
    "functions/sample_column": {
        "samples": {
            "task.sync();": "",
            "best.note_nan(pair.x), best.note_nan(pair.y);": "",
        }
    },
    "functions/mark_experts": {"marked": {"task.sync();": ""}},
    "functions/best_column": {
        "spoiled": {
            "has_nan || element != element": "false",
            "ptx::named_barrier_any<Task::threads>(1, has_fault)": "has_fault",
        }
    },
    "functions/plan_tiles": {"moe": {"    task.sync();": ""}},
    "functions/score_experts": {"moe": {"    task.sync();": ""}},
    "queue/pop": {
        "queue": {
            "ptx::load_acquire<kPeersPush<Program>>(slot)": "ptx::load_relaxed(slot)"
        }
    },
    "queue/release": {"mlp on tiles": {"  fence_groups<Call>();": ""}},
    "queue/push": {
        "queue": {"surplus > 0": "false", "bits &= ~(1u << j);": ""},
        "counts": {"        ptx::fence_acq_rel<false>();": ""},
        "queue, conditions": {"Call::wait(run.g, c, n).target == 0": "false"},
    },
    "functions/row_pairs": {
        "few": {"    task.sync();": ""},
        "wide": {"task.sync();  // before they are written again": ""},
        "few, scaled": {
            "task.thread % 2 == 0 ? first : second": "first",
            "pair * scales.next": "pair",
            "u64(expert) * scales.by_expert": "0",
            "u64(by_column) * scales.by_expert": "0",
            "u64(u32(row) >> kShift) * scales.pitch": "0",
            "kHasBlocks ? step * 2 * sizeof(Element) : 0": "0",
            "source + i * sizeof(Element)": "source",
            "n == 0 ? codes.x : codes.y": "codes.x",
            "i * 8 + lane % 4 * 2 + lane / 4 % 2": "i * 8 + lane % 4 * 2",
            "if (value >= size) value -= size, ++expert;": "",
            "lane % 2": "0",
        },
        "octaves": {"!vector.is_exact": "false", "word = 0;": ""},
    },
    "functions/half_vector": {
        "octaves": {
            "!__any_sync(~0u, minimum_of(least, least << 16) < lowest)": "true",
            "ptx::warp_max(maximum_of(largest, largest << 16))": "largest",
            "octave_of(127 + 15 + 127) - octave": "octave_of(127)",
            "octave_of(253)": "octave_of(255)",
            "octave - octave_of(32)": "octave - octave_of(36)",
            "octave_of(254) - scale": "octave_of(127)",
        },
    },
    "event/flags": {
        "flagged": {
            "low[i] = ptx::load_words(source)": f"low[i] = {TORN}",
            "u64(run.epoch & 1)": "u64(0)",
            "has_epoch(low[i]) & has_epoch(high[i])": "has_epoch(low[i])",
            "u32(words.first >> 32) == run_.epoch": "true",
            "u64(run_.epoch) << 32": "u64(run_.epoch & 1) << 32",
        }
    },
    "event/wait": {
        "conditions of dims": {"if (event.target == 0) return true;": ""},
        "sent": {"ptx::load_acquire<true>(address)": "ptx::load_relaxed(address)"},
        "sum, few rows": {"i32(epoch_of(run, rank) - run.epoch) < 0": "false"},
    },
}
MUTATIONS = [
    (case, file, text, instead)
    for file, cases in BROKEN.items()
    for case, texts in cases.items()
    for text, instead in texts.items()
]


def write_mutated(folder: Path) -> None:
    """The kernels, with all mutations; the variable `mutation` selects one, and 0 is
    none of them."""
    shutil.copytree(kernels_folder(), folder)
    first = folder / "common" / "integers.cuh"
    first.write_text(f'{first.read_text()}\nextern "C" {{\nint mutation = 0;\n}}\n')
    for mutation_number, (_, file, text, instead) in enumerate(MUTATIONS, 1):
        path = folder / f"{file}.cuh"
        before, separator, after = path.read_text().partition(text)
        assert separator, f"{file} has no {text}"
        is_broken = f"mutation == {mutation_number}"
        if ";" in text:
            either = f"if ({is_broken}) {{\n{instead}\n}} else {{\n{text}\n}}"
        else:
            either = f"({is_broken} ? ({instead}) : ({text}))"
        path.write_text(before + either + after)
