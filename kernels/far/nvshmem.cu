// The functions that far/nvshmem.cuh declares: compiled once, and linked with each program over
// hosts. All of it is inlined: linking NVSHMEM's archive would make ptxas ignore setmaxnreg.
#include <cuda/std/type_traits>
// NVSHMEM uses std::, which NVRTC has only as cuda::std.
namespace std {
using cuda::std::is_integral;
using cuda::std::is_same;
using cuda::std::is_signed;
using cuda::std::is_unsigned;
}  // namespace std
// NOTE: defined before the first header, in which newer versions of NVSHMEM read it.
#define NVSHMEM_ENABLE_ALL_DEVICE_INLINING
#include <non_abi/nvshmem_build_options.h>
// These need headers that NVRTC does not have.
#undef NVSHMEM_IBGDA_SUPPORT
#undef NVSHMEM_IBGDA_SUPPORT_GPUMEM_ONLY
#undef NVSHMEM_GPUNETIO_SUPPORT
#include <nvshmem.h>
#include <nvshmemx.h>

// nvshmemx_cumodule_init() looks these up by name.
__constant__ nvshmemi_device_host_state_t nvshmemi_device_state_d;
__constant__ nvshmemi_version_t nvshmemi_device_lib_version_d = {
    NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION};

extern "C" {
__device__ void etc_far_put(
    const void* source, void* target, unsigned long long bytes, void* word,
    unsigned long long value,
    int rank) {
  uint64_t* const signal = static_cast<uint64_t*>(word);
  if (bytes > 0) {
    nvshmemx_putmem_signal_nbi_warp(target, source, bytes, signal, value, NVSHMEM_SIGNAL_ADD, rank);
  } else if (threadIdx.x % 32 == 0) {
    nvshmemx_signal_op(signal, value, NVSHMEM_SIGNAL_ADD, rank);
  }
}
__device__ void etc_far_add(void* word, unsigned long long value, int rank) {
  nvshmemx_signal_op(static_cast<uint64_t*>(word), value, NVSHMEM_SIGNAL_ADD, rank);
}
__device__ void etc_far_quiet() { nvshmem_quiet(); }
}
