// A program's arrays, and the check of every access. Part of run.cpp.
#pragma once
#include "scheduler.h"

BEGIN_UNTRACKED

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;  // of this library

namespace emulation {

constexpr uint32_t kTurnLimit = 15'000'000;  // accesses of a thread without a yield

// An array. Accesses are checked for order only if it may be written.
struct Range {
  uint64_t begin, end, is_written;
  Block* blocks;

  uint64_t count() const { return (end - begin + 15) / 16; }
  bool has(uint64_t address, uint64_t bytes) const {
    return address >= begin && address + bytes <= end;
  }
};
static Range *ranges, *recent;  // of all arrays, by address; the one of the last access
static uint32_t range_count;

// A hash table of the words that atomics access.
constexpr uint32_t kAtoms = 1 << 16;
struct Used {
  uint64_t address;
  Atom atom;
};
static Used* atoms;
static uint32_t atom_count;

// Bytes that several lanes of a warp have written, with the same values.
static struct {
  const void* at;
  uint64_t bytes;
  uint8_t was[16];
} written;

static void check_lane_writes() {
  if (written.bytes > 0 && memcmp(written.at, written.was, written.bytes) != 0) {
    fail("lanes of a warp have written different values to one place");
  }
  written.bytes = 0;
}
static void check_at(
    Block* blocks, const uint8_t* memory, uint64_t offset, uint64_t bytes, const Access& access,
    Row row) {
  check_lane_writes();
  lanes_overlap = false;
  checked_array = uint64_t(memory);
  check(blocks, offset, bytes, access, row);
  if (!lanes_overlap) return;
  written.at = memory + offset, written.bytes = bytes;
  __builtin_memcpy(written.was, written.at, bytes);
}

static Range* find_range(uint64_t address, uint64_t bytes) {
  if (recent->has(address, bytes)) return recent;
  uint32_t first = 0, stop = range_count;  // first: the last range that begins here or before
  while (stop - first > 1) {
    const uint32_t middle = (first + stop) / 2;
    (ranges[middle].begin <= address ? first : stop) = middle;
  }
  recent = ranges + first;
  return recent->has(address, bytes) ? recent : nullptr;
}
bool is_written(uint64_t address) {
  const Range* const range = find_range(address, 1);
  return range != nullptr && range->is_written != 0;
}
uint8_t* global(uint64_t address, uint64_t bytes, uint32_t unit) {
  if (find_range(address, bytes) == nullptr) {
    fail_at("an access out of bounds of all arrays", address);
  }
  if (address % unit != 0) fail_at("a global address that is not aligned", address);
  return reinterpret_cast<uint8_t*>(address);
}

static void access_range(Range& range, uint64_t address, uint64_t bytes, const Access& access) {
  if (range.is_written != 0) {
    const uint8_t* const memory = reinterpret_cast<const uint8_t*>(range.begin);
    check_at(range.blocks, memory, address - range.begin, bytes, access, kGlobal);
  } else if (access.writes) {
    fail_at("an input is written", address);
  }
}
void access_global(const void* at, uint64_t bytes, const Access& access) {
  access_range(*find_range(uint64_t(at), bytes), uint64_t(at), bytes, access);
}
void access_shared(const Worker& worker, uint32_t offset, uint32_t bytes, const Access& access) {
  check_at(worker.blocks, worker.shared, offset, bytes, access, kShared);
}
static bool is_in(const void* at, const void* begin, uint64_t bytes) {
  return uint64_t(at) - uint64_t(begin) < bytes;
}
// An access of the running thread to memory that is not its stack.
__attribute__((noinline)) static void access_memory(
    const void* at, uint64_t bytes, Kind kind, bool writes) {
  if ((uint64_t(at) & (bytes - 1)) != 0) fail("an access that is not aligned");
  const Access access = access_of(own->known, kind, writes);
  const Worker& worker = *own->worker;
  const uint64_t offset = uint64_t(at) - uint64_t(worker.shared);
  if (offset + bytes <= worker.shared_bytes) {
    check_at(worker.blocks, worker.shared, offset, bytes, access, kShared);
  } else if (Range* const range = find_range(uint64_t(at), bytes); range != nullptr) {
    access_range(*range, uint64_t(at), bytes, access);
  } else if (!is_in(at, &__ehdr_start, uint64_t(&_end) - uint64_t(&__ehdr_start)) &&
             !is_in(at, own, sizeof *own) &&
             (writes || (!is_in(at, threads, thread_count * sizeof *threads) &&
                         !is_in(at, workers, worker_count * sizeof *workers)))) {
    fail_at("an access out of bounds of all arrays", uint64_t(at));
  }
}
// An access of the running thread. Its own stack and the emulator's memory of it are not checked,
// nor reads of the emulator's other memory.
static void access(const void* at, uint64_t bytes, Kind kind, bool writes) {
  if (own == nullptr) return;
  if (++accesses > kTurnLimit) {
    fail("a thread that polls memory in a loop without ptx::nanosleep or an acquire");
  }
  if (!is_in(at, own->context.uc_stack.ss_sp, kStack)) access_memory(at, bytes, kind, writes);
}
void access_atomic(const void* at, uint64_t bytes) { access(at, bytes, kAtomic, true); }
void use_word(uint64_t address, const Atomic& how) {
  Used* used = atoms + (address / 4 * 0x9e3779b97f4a7c15ull >> 48);
  while (used->address != address && used->address != 0) {
    used = used + 1 == atoms + kAtoms ? atoms : used + 1;
  }
  if (used->address == 0) {
    used->address = address;
    if (++atom_count == kAtoms) fail("more than 65535 words that atomics access");
  }
  Worker& worker = *own->worker;
  Access access = access_of(own->known, kAtomic, how.writes);
  if (how.writes) {
    access.clock = own->known.atomic = ++worker.atomics[own->id / 32];
    access.agent = own->known.atomics();
  }
  access_global(reinterpret_cast<void*>(address), 4, access);
  use(used->atom, own->known, own->fences, worker.rank, how);
}

}  // namespace emulation

// Called before each access of the program, except those of ptx/.
#define ACCESSES(bytes, type)                                   \
  extern "C" void __sanitizer_cov_load##bytes(const type* at) {  \
    emulation::access(at, bytes, emulation::kPlain, false);     \
  }                                                             \
  extern "C" void __sanitizer_cov_store##bytes(const type* at) { \
    emulation::access(at, bytes, emulation::kPlain, true);      \
  }
ACCESSES(1, uint8_t)
ACCESSES(2, uint16_t)
ACCESSES(4, uint32_t)
ACCESSES(8, uint64_t)
ACCESSES(16, void)
#undef ACCESSES

END_UNTRACKED
