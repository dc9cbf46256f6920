// The rest of threads.h, and the entry that emulation.py calls. Behind a program.
#pragma once
#include <sys/mman.h>

namespace emulation {

Thread* own = nullptr;

static ucontext_t scheduler, end;
static char failure[200];
static const void* arguments[kMaxRanks];
static uint64_t state, clock_ns;
static bool is_forward;
static Later* waiting = nullptr;
static uint32_t waiting_count = 0, waiting_room = 0;

static uint32_t draw(uint32_t limit) {  // xorshift64
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return uint32_t(state >> 32) % limit;
}

void fail(const char* what) {
  snprintf(failure, sizeof failure, "%s; the last turn was of rank %u, worker %u, thread %u", what,
           own->worker->rank, own->worker->index, own->id);
  setcontext(&end);
  abort();
}
void yield() { swapcontext(&own->context, &scheduler); }
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
  if (come == 0) any[this_turn] = false;
  any[this_turn] |= value;
  if (++come == count) {
    come = 0, ++turn;
    go_on();
  } else {
    wait_turn(&turn);
  }
  return any[this_turn];
}

const Words* exchange(Words words) {
  auto& warp = own->worker->warps[own->id / 32];
  Words* const all = warp.words[warp.turn & 1];
  all[own->id % 32] = words;
  if (++warp.come == 32) {
    warp.come = 0, ++warp.turn;
  } else {
    wait_turn(&warp.turn);
  }
  return all;
}

void later(const Later& what) {
  if (waiting_count == waiting_room) {
    waiting_room = waiting_room * 2 + 64;
    waiting = static_cast<Later*>(realloc(waiting, waiting_room * sizeof(Later)));
  }
  waiting[waiting_count++] = what;
  go_on();
}

void move_box(const Later& box, bool is_store) {
  const Map& map = *box.map;
  uint32_t rows = 1;
  for (uint32_t i = 1; i < map.axes; ++i) rows *= map.side[i];
  const uint32_t row_bytes = map.side[0] * map.itemsize;
  if (row_bytes != 128 || box.shared % 128 != 0) fail("a box is not of rows of 128 bytes");
  for (uint32_t r = 0; r < rows; ++r) {
    bool is_inside = true;
    uint64_t row = map.pointer;
    for (uint32_t i = 1, rest = r; i < map.axes; rest /= map.side[i], ++i) {
      const int64_t k = box.first[i] + int64_t(rest % map.side[i]);
      is_inside = is_inside && k >= 0 && k < map.extent[i];
      row += uint64_t(k) * map.pitch[i];
    }
    for (uint32_t e = 0; e < map.side[0]; ++e) {
      const int64_t k = box.first[0] + int64_t(e);
      const bool is_there = is_inside && k >= 0 && k < map.extent[0];
      void* const global = reinterpret_cast<void*>(row + uint64_t(k) * map.itemsize);
      const uint32_t shared = swizzled(box.shared + r * 128 + e * map.itemsize);
      for (uint32_t place = 0; place < kMaxCluster; ++place) {
        if ((box.mask >> place & 1) == 0) continue;
        uint8_t* const here = box.worker->cluster[place]->shared + shared;
        if (!is_store && !is_there) {
          memset(here, 0, map.itemsize);
        } else if (is_there) {
          memcpy(is_store ? global : here, is_store ? here : global, map.itemsize);
        }
      }
    }
  }
}

static Barrier& barrier_of(const Later& what, uint32_t place) {
  return *reinterpret_cast<Barrier*>(what.worker->cluster[place]->shared + what.barrier);
}
static void happen(const Later& what) {
  if (what.kind == Later::kLoad) {
    move_box(what, false);
    uint32_t bytes = what.map->itemsize;
    for (uint32_t i = 0; i < what.map->axes; ++i) bytes *= what.map->side[i];
    for (uint32_t place = 0; place < kMaxCluster; ++place) {
      if (what.mask >> place & 1) barrier_of(what, place).complete(bytes);
    }
  } else if (what.kind == Later::kCopies) {
    for (uint32_t i = 0; i < what.count; ++i) {
      memset(what.copies[i].to, 0, 16);
      memcpy(what.copies[i].to, what.copies[i].from, what.copies[i].bytes);
    }
    free(what.copies);
    barrier_of(what, what.worker->place).arrive(1);
  } else {
    memcpy(what.worker->shared + what.shared, &what.value, 4);
    barrier_of(what, what.worker->place).complete(4);
  }
}

// NOTE: no new: there is no C++ library.
template <class T>
static T* make(size_t count) {
  return static_cast<T*>(calloc(count, sizeof(T)));
}

static void run_thread() {
  etc_dist_program(*static_cast<const etc::Args*>(arguments[own->worker->rank]));
  if (own->count > 0) fail("products that nobody waited for");
  own->is_over = true;
  yield();
}

static void run_ranks(
    const void* const* blocks, int ranks, int count, int cluster, int shared_bytes) {
  constexpr size_t kStack = 192 * 1024;
  const size_t workers = size_t(ranks) * size_t(count), threads = workers * kThreads;
  Worker* const all = make<Worker>(workers);
  Thread* const thread = make<Thread>(threads);
  char* const stacks = static_cast<char*>(
      mmap(nullptr, threads * kStack, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (size_t w = 0; w < workers; ++w) {
    Worker& worker = all[w];
    worker.index = uint32_t(w) % uint32_t(count), worker.count = uint32_t(count);
    worker.rank = uint32_t(w) / uint32_t(count), worker.place = uint32_t(w) % uint32_t(cluster);
    arguments[worker.rank] = blocks[worker.rank];
    worker.shared = static_cast<uint8_t*>(aligned_alloc(1024, (shared_bytes + 1023) / 1024 * 1024));
    memset(worker.shared, 0xff, shared_bytes);  // not a number
    Worker* const first = &worker - worker.place;
    worker.pair = worker.place == 0 ? make<Meeting>(1) : first->pair;
    for (int i = 0; i < cluster; ++i) worker.cluster[i] = first + i;
  }
  for (size_t t = 0; t < threads; ++t) {
    thread[t].worker = &all[t / kThreads], thread[t].id = uint32_t(t % kThreads);
    ucontext_t& context = thread[t].context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks + t * kStack, context.uc_stack.ss_size = kStack;
    makecontext(&context, run_thread, 0);
  }
  for (size_t left = threads; left > 0; clock_ns += is_forward ? 1000 : 50000) {
    is_forward = false;
    const uint32_t first = draw(uint32_t(threads)), slow = draw(uint32_t(workers) * 4);
    for (size_t i = 0; i < threads; ++i) {
      Thread& t = thread[(first + i) % threads];
      const bool waits = t.turn != nullptr && *t.turn == t.seen;
      if (t.is_over || waits || size_t(t.worker - all) == slow || draw(8) == 0) continue;
      own = &t;
      swapcontext(&scheduler, &t.context);
      left -= t.is_over;
    }
    for (uint32_t i = 0; i < waiting_count;) {
      if (draw(3) == 0) {
        const Later what = waiting[i];
        waiting[i] = waiting[--waiting_count];
        happen(what);
      } else {
        ++i;
      }
    }
  }
  if (waiting_count > 0) fail("copies that nobody waited for");
  munmap(stacks, threads * kStack);
  for (size_t w = 0; w < workers; ++w) {
    if (all[w].place == 0) free(all[w].pair);
    free(all[w].shared);
  }
  free(thread);
  free(all);
}

// Runs one program on `ranks` GPUs of `count` workers, whose argument blocks are given. What went
// wrong, if anything did; then nothing is freed.
extern "C" const char* run_emulated(
    const void* const* blocks, int ranks, int count, int cluster, int shared_bytes,
    uint64_t seed) {
  state = (seed + 1) * 0x9e3779b97f4a7c15ull, clock_ns = 0, waiting_count = 0, failure[0] = 0;
  getcontext(&end);
  if (failure[0] == 0) run_ranks(blocks, ranks, count, cluster, shared_bytes);
  return failure[0] == 0 ? nullptr : failure;
}

}  // namespace emulation
