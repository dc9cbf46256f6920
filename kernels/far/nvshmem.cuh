// The transport to far ranks by NVSHMEM's device API. Another transport needs the same three
// functions.
//
// Addresses are in this rank's symmetric block: the message is for the same place in the block of
// `rank`. Words are only changed by messages, which are atomic with each other.
// NOTE: the functions are linked from far/nvshmem.cu, as NVSHMEM's headers take seconds to compile.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

extern "C" {
__device__ void etc_far_put(
    const void* source, void* target, unsigned long long bytes, void* word,
    unsigned long long value,
    int rank);
__device__ void etc_far_add(void* word, unsigned long long value, int rank);
__device__ void etc_far_quiet();
}

namespace etc {

struct Nvshmem {
  // By one warp: sends `bytes` from `source` to `target`, then adds `value` to the 64-bit word
  // `word`. `source` must keep its content until a later quiet() returns, in any thread.
  ETC_DEVICE static void put(u64 source, u64 target, u64 bytes, u64 word, u64 value, i32 rank) {
    // The host and the network card read what other workers have written.
    if (ptx::lane() == 0) ptx::fence_acq_rel<true>();
    __syncwarp();
    etc_far_put(
        reinterpret_cast<const void*>(source), reinterpret_cast<void*>(target), bytes,
        reinterpret_cast<void*>(word), value, rank);
  }
  // By one thread: adds `value` to the 64-bit word `word`. What the thread has written before is
  // not part of the message.
  ETC_DEVICE static void add(u64 word, u64 value, i32 rank) {
    etc_far_add(reinterpret_cast<void*>(word), value, rank);
  }
  // By one thread: waits until all messages of this rank so far have arrived.
  ETC_DEVICE static void quiet() { etc_far_quiet(); }
};

}  // namespace etc
