// The program's entry point for run.cpp, which does not know the type of its arguments. Included
// after the program.
#pragma once

BEGIN_UNTRACKED_CALLS

namespace etc {
// The symmetric block of a rank, for far/nvshmem.cuh.
inline u64 block_of(i32 rank) {
  return static_cast<const Args*>(emulation::arguments_of(u32(rank)))->peer[rank];
}
}  // namespace etc

extern "C" void run_program(const void* arguments) {
  etc_dist_program(*static_cast<const etc::Args*>(arguments));
}

END_UNTRACKED_CALLS
