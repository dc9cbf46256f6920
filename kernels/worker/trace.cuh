// The timeline: when each warp began and ended each of its tasks.
#pragma once
#include "event/wait.cuh"

namespace etc {

struct TraceRecord {
  u64 begin, end;
  u32 lane, call, task;
  u32 empty;  // nanoseconds in which the task waited for its stages
};
static_assert(sizeof(TraceRecord) == 32);
constexpr u32 kTraceWarps = 12;

// The records of one warp; no code unless the program is traced. The buffer has `trace_capacity`
// records per warp; `begin` of record 0 is the number of tasks, including dropped records.
template <class Program>
struct Tracer {
  TraceRecord* records;
  u32 capacity, count;

  ETC_DEVICE explicit Tracer(const Run<Program>& run) : records(nullptr), capacity(0), count(0) {
    if constexpr (Program::kTrace) {
      capacity = run.g.trace_capacity;
      const u64 warp = u64(blockIdx.x) * kTraceWarps + threadIdx.x / 32;
      records = reinterpret_cast<TraceRecord*>(run.g.trace) + warp * capacity;
      if (threadIdx.x % 32 == 0) records[0].begin = 0;
    }
  }
  ETC_DEVICE u64 now() const {
    if constexpr (Program::kTrace) return ptx::global_timer();
    return 0;
  }
  ETC_DEVICE void add(u32 lane, u32 call, u32 task, u64 begin, u32 empty = 0) {
    if constexpr (Program::kTrace) {
      if (threadIdx.x % 32 != 0) return;
      if (++count < capacity) {
        records[count] = TraceRecord{begin, ptx::global_timer(), lane, call, task, empty};
      }
      records[0].begin = count;
    }
  }
};

}  // namespace etc
