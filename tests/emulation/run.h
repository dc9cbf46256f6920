// The rest of threads.h, and the entry that emulation.py calls. Behind a program.
#pragma once
#include <signal.h>
#include <sys/mman.h>

namespace emulation {

Thread* own = nullptr;

constexpr uint64_t kRunLimit = 2'000'000'000;  // nanoseconds that a run may last
constexpr size_t kStack = 192 * 1024;

struct Range {
  uint64_t begin, end;
};
struct Store {
  Later box;  // its place in shared memory, whatever is stored
  uint64_t global;
  uint32_t bytes, group;
  const Thread* thread;
  uint8_t* data;  // what shared memory held, if it was read
  uint64_t due;
};
template <class T>
struct List {
  T* items;
  uint32_t count, room;

  void add(const T& item) {
    if (count == room) {
      room = room * 2 + 64;
      items = static_cast<T*>(realloc(items, room * sizeof(T)));
      if (items == nullptr) abort();
    }
    items[count++] = item;
  }
  void remove(uint32_t i) { items[i] = items[--count]; }
};

static jmp_buf scheduler, end;
static char failure[200];
static const void* arguments[kMaxRanks];
static uint64_t state, clock_ns, turns;
static bool is_forward;
static List<Later> waiting;
static List<Store> stores;
static const Range* ranges;  // of all arrays, by address
static uint32_t range_count;
static Worker* workers;
static Thread* threads;
static char* stacks;
static size_t worker_count, thread_count;

static uint32_t draw(uint32_t limit) {  // xorshift64
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return uint32_t(state >> 32) % limit;
}

void fail(const char* what) {
  const Thread& t = *own;
  snprintf(failure, sizeof failure, "%s; the last turn was of rank %u, worker %u, thread %u", what,
           t.worker->rank, t.worker->index, t.id);
  _longjmp(end, 1);
}
// NOTE: not swapcontext, which asks the system for the signals' mask each time.
void yield() {
  if (_setjmp(own->place) == 0) _longjmp(scheduler, 1);
}
void may_yield() {
  if (draw(8) == 0) yield();
}
void wait_turn(const uint32_t* turn) {
  own->turn = turn, own->seen = *turn;
  while (*turn == own->seen) yield();
  own->turn = nullptr;
}
uint64_t now() { return clock_ns; }
void go_on() { is_forward = true; }

bool Meeting::meet(uint32_t count, bool value) {
  const uint32_t this_turn = turn & 1;
  if (come == 0) any[this_turn] = false, of = count;
  if (of != count) fail("threads at one barrier that wait for different numbers of them");
  any[this_turn] |= value;
  if (++come == count) {
    come = 0, ++turn;
    go_on();
  } else {
    wait_turn(&turn);
  }
  return any[this_turn];
}

const Words* exchange(const char* what, Words words) {
  auto& warp = own->worker->warps[own->id / 32];
  Words* const all = warp.words[warp.turn & 1];
  if (warp.come == 0) warp.what = what;
  if (strcmp(warp.what, what) != 0) fail("lanes of a warp in different functions of it");
  all[own->id % 32] = words;
  if (++warp.come == 32) {
    warp.come = 0, ++warp.turn;
  } else {
    wait_turn(&warp.turn);
  }
  return all;
}

uint8_t* global(uint64_t address, uint64_t bytes, uint32_t unit) {
  uint32_t first = 0, behind = range_count;  // the last range that begins here or before
  while (behind - first > 1) {
    const uint32_t middle = (first + behind) / 2;
    (ranges[middle].begin <= address ? first : behind) = middle;
  }
  if (address < ranges[first].begin || address + bytes > ranges[first].end) {
    fail("an access beyond all arrays");
  }
  if (address % unit != 0) fail("a global address that is not aligned");
  return reinterpret_cast<uint8_t*>(address);
}

// Most of what goes on beside the threads takes a few turns, some of it many.
static uint64_t some_turns_on() { return turns + draw(draw(4) == 0 ? 100 : 4); }
void later(const Later& what) {
  waiting.add(what);
  waiting.items[waiting.count - 1].due = some_turns_on();
  go_on();
}

static uint32_t box_rows(const Later& box) {
  uint32_t rows = 1;
  for (uint32_t i = 1; i < box.map->axes; ++i) rows *= box.map->side[i];
  return rows;
}
// Calls row(r, there, global, first, count) for each row of a box, of 128 bytes, of which `count`
// elements from the `first` on are there, if it is.
template <class Row>
static void each_row(const Later& box, Row row) {
  const Map& map = *box.map;
  const uint32_t item = map.itemsize;
  if (map.side[0] * item != 128) fail("a box is not of rows of 128 bytes");
  for (uint32_t r = 0; r < box_rows(box); ++r) {
    bool is_inside = true;
    uint64_t at = map.pointer;
    for (uint32_t i = 1, rest = r; i < map.axes; rest /= map.side[i], ++i) {
      const int64_t k = box.first[i] + int64_t(rest % map.side[i]);
      is_inside = is_inside && k >= 0 && k < map.extent[i];
      at += uint64_t(k) * map.pitch[i];
    }
    const int64_t x = box.first[0], least = x < 0 ? -x : 0;
    const int64_t most = map.extent[0] - x < map.side[0] ? map.extent[0] - x : map.side[0];
    const bool is_there = is_inside && least < most;
    uint8_t* from = nullptr;
    if (is_there) from = global(at + uint64_t(x + least) * item, uint64_t(most - least) * item, 1);
    row(r, is_there, from, uint32_t(least), uint32_t(most - least));
  }
}
static void load_box(const Later& box) {
  const uint32_t item = box.map->itemsize;
  for (uint32_t place = 0; place < kMaxCluster; ++place) {
    if ((box.mask >> place & 1) == 0) continue;
    const Worker& worker = *box.worker->cluster[place];
    at(worker, box.shared, box_rows(box) * 128, 128);
    each_row(box, [&](uint32_t r, bool is_there, uint8_t* from, uint32_t first, uint32_t count) {
      uint8_t row[128] = {};
      if (is_there) memcpy(row + first * item, from, count * item);
      for (uint32_t i = 0; i < 128; i += 16) {
        memcpy(worker.shared + swizzled(box.shared + r * 128 + i), row + i, 16);
      }
    });
  }
}
static void read_store(Store& store) {
  store.data = static_cast<uint8_t*>(malloc(store.bytes));
  memcpy(store.data, at(*store.box.worker, store.box.shared, store.bytes, 16), store.bytes);
}
static void write_store(const Store& store) {
  if (store.box.map == nullptr) {
    memcpy(global(store.global, store.bytes, 16), store.data, store.bytes);
  } else {
    const uint32_t item = store.box.map->itemsize, begin = store.box.shared;
    each_row(store.box, [&](uint32_t r, bool there, uint8_t* to, uint32_t first, uint32_t count) {
      for (uint32_t e = 0; there && e < count; ++e) {
        const uint32_t from = swizzled(begin + r * 128 + (first + e) * item) - begin;
        memcpy(to + e * item, store.data + from, item);
      }
    });
  }
  free(store.data);
}
void store_later(const Later& box, uint64_t global, uint32_t bytes) {
  Store store{box, global, bytes, own->store_groups, own, nullptr, some_turns_on()};
  if (box.map != nullptr) store.bytes = box_rows(box) * 128;
  at(store.box.shared, store.bytes, box.map != nullptr ? 128 : 16);
  if (store.bytes % 16 != 0) fail("a bulk store of no multiple of 16 bytes");
  stores.add(store);
  go_on();
}
void wait_stores(uint32_t pending, bool are_written) {
  for (bool is_over = false; !is_over;) {
    is_over = true;
    for (uint32_t i = 0; i < stores.count; ++i) {
      const Store& store = stores.items[i];
      const bool is_meant = store.thread == own && store.group + pending < own->store_groups;
      if (is_meant && (are_written || store.data == nullptr)) is_over = false;
    }
    if (!is_over) yield();
  }
}

static void happen(const Later& what) {
  if (what.kind == Later::kLoad) {
    load_box(what);
    for (uint32_t place = 0; place < kMaxCluster; ++place) {
      if ((what.mask >> place & 1) == 0) continue;
      barrier(*what.worker->cluster[place], what.barrier).complete(box_rows(what) * 128);
    }
  } else if (what.kind == Later::kCopies) {
    for (uint32_t i = 0; i < what.count; ++i) {
      memset(what.copies[i].to, 0, 16);
      memcpy(what.copies[i].to, what.copies[i].from, what.copies[i].bytes);
    }
    barrier(*what.worker, what.barrier).arrive(1);
    free(what.copies);
  } else {
    memcpy(at(*what.worker, what.shared, 4, 4), &what.value, 4);
    barrier(*what.worker, what.barrier).complete(4);
  }
}
// What goes on beside the threads, now and then.
static void happen_some() {
  for (uint32_t i = 0; i < waiting.count;) {
    if (waiting.items[i].due <= turns) {
      const Later what = waiting.items[i];
      waiting.remove(i);
      happen(what);
    } else {
      ++i;
    }
  }
  for (uint32_t i = 0; i < stores.count;) {
    Store& store = stores.items[i];
    if (store.due > turns) {
      ++i;
    } else if (store.data == nullptr) {
      read_store(store), store.due = some_turns_on();
    } else {
      write_store(store), stores.remove(i);
    }
  }
}

// NOTE: no new: there is no C++ library.
template <class T>
static T* make(size_t count) {
  T* const made = static_cast<T*>(calloc(count, sizeof(T)));
  if (made == nullptr) abort();
  return made;
}

static void run_thread() {
  etc_dist_program(*static_cast<const etc::Args*>(arguments[own->worker->rank]));
  if (own->count > 0) fail("products that nobody waited for");
  if (own->copied > 0) fail("copies that no mbarrier waits for");
  for (uint32_t i = 0; i < stores.count; ++i) {
    if (stores.items[i].thread == own && stores.items[i].data == nullptr) {
      fail("a bulk store that nobody waited for");
    }
  }
  own->is_over = true;
  yield();
}
// NOTE: apart from the loop, none of whose variables may change between both returns of setjmp.
__attribute__((noinline)) static void resume(Thread& t) {
  own = &t;
  if (_setjmp(scheduler) != 0) return;
  if (t.has_begun) _longjmp(t.place, 1);
  t.has_begun = true;
  setcontext(&t.context);
}

static void begin(const void* const* blocks, int count, int cluster, int shared_bytes) {
  for (size_t w = 0; w < worker_count; ++w) {
    Worker& worker = workers[w];
    worker.index = uint32_t(w) % uint32_t(count), worker.count = uint32_t(count);
    worker.rank = uint32_t(w) / uint32_t(count), worker.place = uint32_t(w) % uint32_t(cluster);
    arguments[worker.rank] = blocks[worker.rank];
    const size_t room = (size_t(shared_bytes) + 1023) / 1024 * 1024;
    worker.shared = static_cast<uint8_t*>(aligned_alloc(1024, room));
    if (worker.shared == nullptr) abort();
    worker.shared_bytes = uint32_t(shared_bytes);
    memset(worker.shared, 0xff, room);  // not a number
    Worker* const first = &worker - worker.place;
    worker.pair = worker.place == 0 ? make<Meeting>(1) : first->pair;
    for (int i = 0; i < cluster; ++i) worker.cluster[i] = first + i;
  }
  for (size_t t = 0; t < thread_count; ++t) {
    threads[t].worker = &workers[t / kThreads], threads[t].id = uint32_t(t % kThreads);
    ucontext_t& context = threads[t].context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks + t * kStack, context.uc_stack.ss_size = kStack;
    makecontext(&context, run_thread, 0);
  }
}
static void run_threads() {
  for (size_t left = thread_count; left > 0; clock_ns += is_forward ? 1000 : 50000) {
    is_forward = false;
    bool can_any = waiting.count > 0 || stores.count > 0;
    const uint32_t first = draw(uint32_t(thread_count));
    const uint32_t slow = draw(uint32_t(worker_count) * 4);
    for (size_t i = 0; i < thread_count; ++i) {
      Thread& t = threads[(first + i) % thread_count];
      if (t.is_over || (t.turn != nullptr && *t.turn == t.seen)) continue;
      can_any = true;
      if (size_t(t.worker - workers) == slow || draw(8) == 0) continue;
      resume(t);
      left -= t.is_over;
    }
    happen_some();
    if (left > 0 && !can_any) fail("all threads wait for one another");
    if (clock_ns > kRunLimit) fail("the run does not end");
    ++turns;
  }
  if (waiting.count > 0) fail("copies that nobody waited for");
  while (stores.count > 0) write_store(stores.items[0]), stores.remove(0);
}

static void see_fault(int) { fail("an access to what is no memory"); }

// Runs one program on `ranks` GPUs of `count` workers, whose argument blocks are given, and the
// ranges of all arrays, by address. What went wrong, if anything did.
extern "C" const char* run_emulated(
    const void* const* blocks, const Range* arrays, int array_count, int ranks, int count,
    int cluster, int shared_bytes, uint64_t seed) {
  state = (seed + 1) * 0x9e3779b97f4a7c15ull, clock_ns = turns = 0, failure[0] = 0;
  ranges = arrays, range_count = uint32_t(array_count);
  worker_count = size_t(ranks) * size_t(count), thread_count = worker_count * kThreads;
  workers = make<Worker>(worker_count), threads = make<Thread>(thread_count);
  stacks = static_cast<char*>(mmap(nullptr, thread_count * kStack, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (stacks == MAP_FAILED) abort();
  begin(blocks, count, cluster, shared_bytes);
  struct sigaction seen = {}, before[2];
  seen.sa_handler = see_fault, seen.sa_flags = SA_NODEFER | SA_ONSTACK;
  sigaction(SIGSEGV, &seen, &before[0]), sigaction(SIGBUS, &seen, &before[1]);
  if (_setjmp(end) == 0) run_threads();
  sigaction(SIGSEGV, &before[0], nullptr), sigaction(SIGBUS, &before[1], nullptr);
  for (; waiting.count > 0; waiting.remove(0)) free(waiting.items[0].copies);
  for (; stores.count > 0; stores.remove(0)) free(stores.items[0].data);
  munmap(stacks, thread_count * kStack);
  for (size_t w = 0; w < worker_count; ++w) {
    if (workers[w].place == 0) free(workers[w].pair);
    free(workers[w].shared);
  }
  free(threads), free(workers);
  return failure[0] == 0 ? nullptr : failure;
}

}  // namespace emulation
