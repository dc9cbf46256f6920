// The race detector: of two conflicting accesses, one must happen before the other. Barriers,
// fences, atomics and waits for asynchronous operations order accesses. Vector clocks track this
// order, by the PTX memory model:
//   - An atomic publishes its thread's view as of the last fence, or the current view if it is a
//     release. A thread that reads the value acquires it at its next fence, or at once if the read
//     is an acquire. Both hold within the scopes of the two atomics.
//   - An arrival at an mbarrier publishes to threads of the same worker.
//   - Bulk copies and the tensor cores see the writes of threads only after a proxy fence for that
//     kind of memory, by the writer or by a thread whose view has the write. Their own accesses
//     need no fence after a thread has waited for them.
//   - A shuffle, a vote or a wait for wgmma orders nothing else. __syncwarp orders its lanes.
// So missing synchronization is reported even if the accesses happened in the right order, unless
// something else ordered them in this run.
//
// Not detected: memcpy, memset, and copies of whole structs from memory to memory, other than of
// vector types; a missing fence after the initialization of mbarriers, or between registers and
// wgmma; a lane that does not wait for an atomic of another lane of its warp; races in a run that
// ends early. Atomics of different words are ordered, and read the last value written.
//
// Sources: PTX ISA, "Memory Consistency Model"; Flanagan and Freund, "FastTrack" (PLDI 2009).
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Functions whose accesses are not tracked, nor those of functions inlined into them.
// NOTE: they would be tracked if inlined into the program. So functions that the program calls and
// that access memory are not inlined.
#define UNTRACKED __attribute__((no_sanitize("coverage"), noinline))
#define BEGIN_UNTRACKED \
  _Pragma("clang attribute push(__attribute__((no_sanitize(\"coverage\"))), apply_to = function)")
#define BEGIN_UNTRACKED_CALLS \
  BEGIN_UNTRACKED _Pragma("clang attribute push(__attribute__((noinline)), apply_to = function)")
#define END_UNTRACKED _Pragma("clang attribute pop")
#define END_UNTRACKED_CALLS END_UNTRACKED END_UNTRACKED

BEGIN_UNTRACKED

namespace emulation {

[[noreturn]] void fail(const char* what);

template <class T>
struct List {
  T* items = nullptr;
  uint32_t count = 0, capacity = 0;

  void add(const T& item) {
    if (count == capacity) {
      capacity = capacity * 2 + 8;
      items = static_cast<T*>(realloc(items, capacity * sizeof(T)));
      if (items == nullptr) abort();
    }
    items[count++] = item;
  }
  void remove(uint32_t i) { items[i] = items[--count]; }
  void end() { free(items), items = nullptr, count = capacity = 0; }
};

constexpr uint32_t kThreads = 384, kMaxRanks = 8;

// The agents of a worker that access memory: its threads; the copies that complete on each of its
// mbarriers; each warp's atomics that write (reading one orders it alone; a fence also orders earlier
// accesses of its thread); and the operand reads of the tensor cores for each warp.
constexpr uint32_t kBarriers = 96;
constexpr uint32_t kFirstBarrier = kThreads, kAtomics = kFirstBarrier + kBarriers;
constexpr uint32_t kWgmmas = kAtomics + 16;
constexpr uint32_t kAgents = kWgmmas + 16;

// The rows of a view: of each agent, its accesses up to a count have happened. Rows 2 and 3: those
// that bulk copies see as well, in global and in shared memory.
enum Row : uint32_t { kSeen, kGlobal, kShared, kRows };

// A vector clock; immutable, shared and counted. nullptr is the empty view.
struct View {
  uint32_t uses;
  uint32_t clock[];  // kRows * row_size
};
inline uint32_t row_size;         // all agents
inline uint32_t workers_of_rank;  // their agents are adjacent

typedef uint32_t Eight __attribute__((vector_size(32), aligned(4)));
static_assert(kAgents % 8 == 0);

// All views of a run, and those that are not used now: kept, since all have one size.
inline List<View*> views, unused_views;
inline View* make_view() {
  View* made;
  if (unused_views.count > 0) {
    made = unused_views.items[--unused_views.count];
  } else {
    made = static_cast<View*>(malloc(sizeof(View) + kRows * row_size * 4));
    if (made == nullptr) abort();
    views.add(made);
  }
  made->uses = 1;
  return made;
}
inline View* hold(View* view) {
  if (view != nullptr) ++view->uses;
  return view;
}
inline void drop(View* view) {
  if (view != nullptr && --view->uses == 0) unused_views.add(view);
}
// A copy that may be changed until it is shared.
inline View* copy(const View* view) {
  View* const made = make_view();
  if (view != nullptr) {
    memcpy(made->clock, view->clock, kRows * row_size * 4);
  } else {
    memset(made->clock, 0, kRows * row_size * 4);
  }
  return made;
}
inline void raise(uint32_t& clock, uint32_t to) {
  if (clock < to) clock = to;
}

// A cache of merged and fenced views: many threads have the same view.
struct Memo {
  View *a, *b, *made;
  Row row;
};
inline Memo memos[512];
inline Memo& memo_of(const View* a, const View* b, Row row) {
  const uint64_t mixed = (uint64_t(a) * 31 + uint64_t(b) + row) * 0x9e3779b97f4a7c15ull;
  return memos[mixed >> 55];
}
inline View* note(Memo& memo, View* a, View* b, Row row, View* made) {
  drop(memo.a), drop(memo.b), drop(memo.made);
  memo = {hold(a), hold(b), hold(made), row};
  return made;
}

// The union of two views.
inline View* merge(View* a, View* b) {
  if (b == nullptr || a == b) return hold(a);
  if (a == nullptr) return hold(b);
  Memo& memo = memo_of(a, b, kSeen);
  if (memo.a == a && memo.b == b) return hold(memo.made);
  View* made = make_view();
  Eight more_in_a = {}, more_in_b = {};
  for (uint32_t i = 0; i < kRows * row_size; i += 8) {
    const Eight x = *reinterpret_cast<const Eight*>(a->clock + i);
    const Eight y = *reinterpret_cast<const Eight*>(b->clock + i);
    const Eight most = __builtin_elementwise_max(x, y);
    more_in_a |= most ^ y, more_in_b |= most ^ x;
    *reinterpret_cast<Eight*>(made->clock + i) = most;
  }
  const auto any = [](Eight v) {
    for (int i = 0; i < 8; ++i) {
      if (v[i] != 0) return true;
    }
    return false;
  };
  if (!any(more_in_b)) {
    drop(made), made = hold(a);
  } else if (!any(more_in_a)) {
    drop(made), made = hold(b);
  }
  return note(memo, a, b, kSeen, made);
}
// The same view after a proxy fence: bulk copies see all of it.
inline View* fenced(View* view, Row row) {
  if (view == nullptr) return nullptr;
  Memo& memo = memo_of(view, nullptr, row);
  if (memo.a == view && memo.b == nullptr && memo.row == row) return hold(memo.made);
  View* const made = copy(view);
  uint32_t *const from = made->clock, *const to = from + row * row_size;
  for (uint32_t i = 0; i < row_size; ++i) raise(to[i], from[i]);
  return note(memo, view, nullptr, row, made);
}

// An agent's own counts, and its view of other agents. Own counts: accesses; those that bulk copies
// see; the last atomic of its warp; the wgmmas of its warp that have read.
struct AgentView {
  uint32_t agent, clock, fenced[kRows], atomic, wgmma;
  View* view;

  uint32_t of_warp(uint32_t first) const {
    return agent / kAgents * kAgents + first + agent % kAgents / 32 % 16;
  }
  uint32_t atomics() const { return of_warp(kAtomics); }
  uint32_t wgmmas() const { return of_warp(kWgmmas); }
  bool covers(uint32_t other, uint32_t until, Row row) const {
    if (other == atomics() && until <= atomic) return true;
    if (other == wgmmas() && until <= wgmma) return true;
    if (other == agent) return until <= (row == kSeen ? clock : fenced[row]);
    return view != nullptr && until <= view->clock[row * row_size + other];
  }
  void set(View* now) { drop(view), view = now; }
  void acquire(View* more) { set(merge(view, more)); }
  void fence(Row row) {
    set(emulation::fenced(view, row));
    fenced[row] = clock++;
  }
  // The current state, for an asynchronous operation. Later accesses get a higher clock.
  AgentView issue() {
    AgentView now = *this;
    hold(view), ++clock;
    return now;
  }
};

// The union of several agents' views.
struct Sum {
  View* view = nullptr;
  List<AgentView> agents;  // without their views

  void add(AgentView& known) {
    View* const all = merge(view, known.view);
    drop(view), view = all;
    agents.add(known);
    ++known.clock;
  }
  View* take() {
    View* const all = copy(view);
    for (uint32_t i = 0; i < agents.count; ++i) {
      const AgentView& a = agents.items[i];
      raise(all->clock[a.agent], a.clock), raise(all->clock[a.atomics()], a.atomic);
      raise(all->clock[a.wgmmas()], a.wgmma);
      for (uint32_t row = kGlobal; row < kRows; ++row) {
        raise(all->clock[row * row_size + a.agent], a.fenced[row]);
      }
    }
    drop(view), view = nullptr, agents.count = 0;
    return all;
  }
};
inline View* release(AgentView& known) {
  Sum alone;
  alone.add(known);
  View* const all = alone.take();
  alone.agents.end();
  return all;
}

// The kind of an access: by a thread, by a bulk copy or the tensor cores, or atomic.
enum Kind : uint8_t { kNone, kPlain, kAsync, kAtomic };

// The last write of some adjacent bytes and the reads since: in a list, or the last one by agent.
struct Cell {
  uint32_t writer, clock, read;
  Kind kind;
  uint32_t* by_agent;
};
// 16 bytes, the size of most accesses; split into pairs of bytes where they differ, and into bytes
// where single ones are accessed. unit: the bytes of a part.
struct Block {
  Cell whole;
  Cell* parts;
  uint32_t unit;
};
struct Read {
  uint32_t reader, clock, next;
  Kind kind;
  bool wrote = false;  // an atomic write before another one
};
inline List<Read> reads;  // index 0 is unused
inline uint32_t free_read;
inline uint32_t add_read(const Read& read) {
  if (free_read != 0) {
    const uint32_t made = free_read;
    free_read = reads.items[made].next, reads.items[made] = read;
    return made;
  }
  if (reads.count == 0) reads.add({});
  reads.add(read);
  return reads.count - 1;
}

// An access that is issued with the view `known`, and complete when `agent` reaches `clock`.
struct Access {
  const AgentView* known;
  uint32_t agent, clock;
  Kind kind;
  bool writes;
};
inline Access access_of(const AgentView& known, Kind kind, bool writes) {
  return {&known, known.agent, known.clock, kind, writes};
}

inline void name_agent(char (&name)[80], uint32_t agent) {
  const uint32_t worker = agent / kAgents, of = agent % kAgents;
  const char* const what = of < kFirstBarrier ? "thread"
                           : of < kAtomics    ? "a copy counted by mbarrier"
                           : of < kWgmmas     ? "an atomic of warp"
                                              : "a wgmma of warp";
  const uint32_t number = of < kFirstBarrier ? of
                          : of < kAtomics    ? of - kFirstBarrier
                                             : (of - kAtomics) % 16;
  snprintf(name, sizeof name, "%s %u of rank %u, worker %u", what, number,
           worker / workers_of_rank, worker % workers_of_rank);
}
// Where the global array begins whose accesses are checked.
static uint64_t checked_array;

[[noreturn]] inline void fail_order(
    const Access& access, Row row, uint64_t at, uint32_t other, Kind kind, bool wrote) {
  static const char* const kinds[] = {"", "", " in bulk or by wgmma", " by an atomic"};
  static char what[320];
  char first[80], second[80], place[40];
  name_agent(first, access.agent), name_agent(second, other);
  const auto number = static_cast<unsigned long long>(at + (row == kShared ? 0 : checked_array));
  snprintf(place, sizeof place, row == kShared ? "byte %llu of shared memory" : "@%llx", number);
  snprintf(what, sizeof what, "a data race at %s: %s%s for %s, %s%s for %s, in no order", place,
           wrote ? "written" : "read", kinds[kind], second, access.writes ? "written" : "read",
           kinds[access.kind], first);
  fail(what);
}

constexpr uint32_t kMaxListedReads = 12;
// Converts the list of reads, except atomics, to an array by agent.
inline void index_by_agent(Cell& cell) {
  cell.by_agent = static_cast<uint32_t*>(calloc(row_size, 4));
  if (cell.by_agent == nullptr) abort();
  uint32_t left = 0;
  for (uint32_t i = cell.read, next; i != 0; i = next) {
    Read& read = reads.items[i];
    next = read.next;
    uint32_t& list = read.kind == kAtomic ? left : free_read;
    if (read.kind != kAtomic) raise(cell.by_agent[read.reader], read.clock);
    read.next = list, list = i;
  }
  cell.read = left;
}

// Two lanes of a warp have written the same bytes: allowed if the values are equal.
inline bool lanes_overlap;
inline bool of_one_warp(uint32_t a, uint32_t b) {
  const uint32_t first = a % kAgents, second = b % kAgents;
  return a / kAgents == b / kAgents && first < kThreads && first / 32 == second / 32;
}
// Whether the view has a read by the tensor cores of the last write: then it has the write too.
inline bool has_been_read(const Cell& cell, const AgentView& known) {
  const auto is_known = [&](uint32_t reader, uint32_t clock) {
    return clock > 0 && reader % kAgents >= kWgmmas && known.covers(reader, clock, kSeen);
  };
  for (uint32_t i = cell.read; i != 0; i = reads.items[i].next) {
    if (is_known(reads.items[i].reader, reads.items[i].clock)) return true;
  }
  for (uint32_t i = 0; cell.by_agent != nullptr && i < row_size; ++i) {
    if (is_known(i, cell.by_agent[i])) return true;
  }
  return false;
}
// `at` counts bytes, for the message.
inline void check_cell(Cell& cell, const Access& access, Row row, uint64_t at) {
  const AgentView& known = *access.known;
  const bool is_atomic = access.kind == kAtomic;
  if (cell.kind != kNone && !(is_atomic && cell.kind == kAtomic)) {
    const Row seen = access.kind == kAsync && cell.kind != kAsync ? row : kSeen;
    if (!known.covers(cell.writer, cell.clock, seen) && !has_been_read(cell, known)) {
      const bool by_both = access.writes && access.kind == kPlain && cell.kind == kPlain;
      if (!by_both || !of_one_warp(access.agent, cell.writer)) {
        fail_order(access, row, at, cell.writer, cell.kind, true);
      }
      lanes_overlap = true;
    }
  }
  for (uint32_t i = cell.read; i != 0 && !is_atomic; i = reads.items[i].next) {
    const Read& read = reads.items[i];
    if (read.wrote && !known.covers(read.reader, read.clock, kSeen)) {
      fail_order(access, row, at, read.reader, read.kind, true);
    }
  }
  if (access.writes) {
    uint32_t atomics = 0;  // unordered with this atomic
    if (is_atomic && cell.kind == kAtomic && !known.covers(cell.writer, cell.clock, kSeen)) {
      atomics = add_read({cell.writer, cell.clock, 0, kAtomic, true});
    }
    for (uint32_t i = cell.read, next; i != 0; i = next) {
      Read& read = reads.items[i];
      next = read.next;
      // NOTE: bulk loads into a ring need no fence after reads of the previous contents.
      const Row seen = access.kind == kAsync && read.kind != kAsync && row == kGlobal ? row : kSeen;
      const bool is_known = known.covers(read.reader, read.clock, seen);
      const bool stays = is_atomic && read.kind == kAtomic && !is_known;
      if (!is_known && !stays) fail_order(access, row, at, read.reader, read.kind, false);
      uint32_t& list = stays ? atomics : free_read;
      read.next = list, list = i;
    }
    for (uint32_t i = 0; cell.by_agent != nullptr && i < row_size; ++i) {
      const bool is_thread = i % kAgents < kThreads;
      const Row seen = access.kind == kAsync && is_thread && row == kGlobal ? row : kSeen;
      if (cell.by_agent[i] != 0 && !known.covers(i, cell.by_agent[i], seen)) {
        fail_order(access, row, at, i, kPlain, false);
      }
    }
    free(cell.by_agent);
    cell = {access.agent, access.clock, atomics, access.kind, nullptr};
    return;
  }
  if (cell.by_agent != nullptr && !is_atomic) {
    cell.by_agent[access.agent] = access.clock;
    return;
  }
  // Replaces a read that happened before this one: a view with this one has both.
  uint32_t count = 0;
  for (uint32_t i = cell.read; i != 0; i = reads.items[i].next, ++count) {
    Read& read = reads.items[i];
    const bool is_alike = (read.kind == kAtomic) == is_atomic && !read.wrote;
    // NOTE: a wgmma is published alone, without the view of its warp.
    const bool implies_all = access.agent % kAgents < kWgmmas || read.reader == access.agent;
    if (is_alike && implies_all && known.covers(read.reader, read.clock, kSeen)) {
      read.reader = access.agent, read.clock = access.clock, read.kind = access.kind;
      return;
    }
  }
  cell.read = add_read({access.agent, access.clock, cell.read, access.kind});
  if (count == kMaxListedReads && !is_atomic) index_by_agent(cell);
}
inline uint32_t copy_reads(uint32_t from) {
  uint32_t made = 0;
  for (uint32_t i = from; i != 0; i = reads.items[i].next) {
    Read read = reads.items[i];
    read.next = made, made = add_read(read);
  }
  return made;
}
// Sets copies[0] to a cell and the others to copies of it.
inline void copy_cell(const Cell& cell, Cell* copies, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    copies[i] = cell;
    if (i == 0) continue;
    copies[i].read = copy_reads(cell.read);
    if (cell.by_agent == nullptr) continue;
    copies[i].by_agent = static_cast<uint32_t*>(malloc(row_size * 4));
    if (copies[i].by_agent == nullptr) abort();
    memcpy(copies[i].by_agent, cell.by_agent, row_size * 4);
  }
}
// Splits a block into parts of `unit` bytes, 2 or 1.
inline void split(Block& block, uint32_t unit) {
  Cell* const before = block.parts;
  const uint32_t count = before == nullptr ? 1 : 16 / block.unit, copies = 16 / unit / count;
  block.unit = unit, block.parts = static_cast<Cell*>(malloc(16 / unit * sizeof(Cell)));
  if (block.parts == nullptr) abort();
  for (uint32_t i = 0; i < count; ++i) {
    copy_cell(before == nullptr ? block.whole : before[i], block.parts + i * copies, copies);
  }
  free(before);
}
inline void check(Block* blocks, uint64_t offset, uint64_t bytes, const Access& access, Row row) {
  const uint64_t end = offset + bytes;
  const uint32_t unit = (offset | bytes) % 2 == 0 ? 2 : 1;
  for (uint64_t at = offset / 16 * 16; at < end; at += 16) {
    Block& block = blocks[at / 16];
    const bool is_whole = offset <= at && at + 16 <= end;
    if (is_whole && block.parts == nullptr) {
      check_cell(block.whole, access, row, at);
      continue;
    }
    if (block.parts == nullptr || block.unit > unit) split(block, unit);
    for (uint64_t i = 0; i * block.unit < 16; ++i) {
      const uint64_t part = at + i * block.unit;
      if (part + block.unit > offset && part < end) check_cell(block.parts[i], access, row, part);
    }
    if (is_whole && access.writes) {  // all parts are equal now
      block.whole = block.parts[0];
      free(block.parts), block.parts = nullptr;
    }
  }
}

// A word that atomics access: the views that each rank released there, to itself and to others.
struct Atom {
  View *within[kMaxRanks], *beyond[kMaxRanks];
  uint32_t ranks, narrow;  // bit masks: ranks that used it; that used it in GPU scope
};
// The view that a thread's relaxed atomics release, and the one that its next fence acquires: in
// the scope of its GPU, and beyond.
struct Fences {
  View *released[2], *seen[2];
};

inline void put(View*& to, View* view) { drop(to), to = view; }
inline void fence_acquire_release(AgentView& known, Fences& fences, bool system) {
  for (int beyond = 0; beyond <= int(system); ++beyond) {
    known.acquire(fences.seen[beyond]);
    put(fences.seen[beyond], nullptr);
  }
  put(fences.released[0], release(known));
  if (system) put(fences.released[1], hold(fences.released[0]));
}

// reads: returns the old value; adds: read-modify-write, continues the release sequence.
struct Atomic {
  bool system, reads, writes, adds, acquires, releases;
};
// If it writes, it is the last atomic of `known`.
inline void use(Atom& atom, AgentView& known, Fences& fences, uint32_t rank, const Atomic& how) {
  atom.ranks |= 1u << rank;
  if (!how.system) atom.narrow |= 1u << rank;
  if (atom.narrow != 0 && (atom.ranks & (atom.ranks - 1)) != 0) {
    fail("an atomic of GPU scope on a word that other GPUs access");
  }
  if (how.reads) {
    View* seen[2] = {hold(atom.within[rank]), nullptr};
    for (uint32_t r = 0; how.system && r < kMaxRanks; ++r) {
      if (r != rank) put(seen[1], merge(seen[1], atom.beyond[r]));
    }
    for (int beyond = 0; beyond < 2; ++beyond) {
      if (how.acquires) {
        known.acquire(seen[beyond]);
      } else {
        put(fences.seen[beyond], merge(fences.seen[beyond], seen[beyond]));
      }
      drop(seen[beyond]);
    }
  }
  if (!how.writes) return;
  if (!how.adds) {  // a plain store ends the release sequences
    for (uint32_t r = 0; r < kMaxRanks; ++r) {
      put(atom.within[r], nullptr), put(atom.beyond[r], nullptr);
    }
  }
  View* const now = how.releases ? release(known) : nullptr;
  View** const released[2] = {&atom.within[rank], &atom.beyond[rank]};
  for (int beyond = 0; beyond <= int(how.system); ++beyond) {
    View* const with_it = copy(how.releases ? now : fences.released[beyond]);
    raise(with_it->clock[known.atomics()], known.atomic);
    put(*released[beyond], merge(*released[beyond], with_it));
    drop(with_it);
  }
  drop(now);
}

}  // namespace emulation

END_UNTRACKED
