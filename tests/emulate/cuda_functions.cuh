// Functions of CUDA C++ that bodies call, one result an element; and bodies that are wrong, some in
// loops that compilers vectorize or replace by memset.
#pragma once
#include "ptx/wgmma_columns.cuh"
#include "worker/task.cuh"

namespace etc {

// y [n] = functions of x [n].
template <class Task>
struct math_functions {
  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto y = task.template operand<1>();
    if (task.thread > 0) return;
    const float v = __ldg(x.at(0));
    const float results[] = {
        rsqrtf(v), expf(v), exp2f(v), __expf(v), logf(v), log2f(v), __logf(v), tanhf(v),
        sqrtf(v), erff(v), fabsf(-v), fmaxf(v, 1.0f), fminf(v, 1.0f), __fdividef(1.0f, v),
        max(v, 1.0f), min(v, 1.0f), exp(v), sqrt(v), rsqrt(v), __frcp_rn(v),
        float(max(1, 2)), float(__float2int_rn(v)), float(__float2int_rz(v)),
        __int_as_float(__float_as_int(v)), float(__clz(1)), float(bf16::from(v)),
        float(f16::from(v)), make_float4(1, 2, 3, v).w, float(make_int2(1, 2).y), powf(v, 2.0f),
        sinf(v), floorf(v)};
    for (i32 n = 0; n < y.size[0]; ++n) __stcs(y.at(n), results[n]);
  }
};

// y [32] = functions of a warp, of x [32].
template <class Task>
struct warp_functions {
  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto y = task.template operand<1>();
    const i32 lane = task.thread;
    const i32 v = *x.at(lane);
    i32 sum = v;
    for (i32 step = 16; step > 0; step /= 2) sum += __shfl_down_sync(~0u, sum, step);
    sum = __shfl_sync(~0u, sum, 0);
    __syncwarp();
    const i32 of_pair = __shfl_xor_sync(~0u, v, 1, 2) + __shfl_up_sync(~0u, v, 1, 2);
    u32* const counter = reinterpret_cast<u32*>(y.at(0));
    if (lane == 0) *counter = 0;
    __syncwarp();
    atomicAdd(counter, 1);
    __syncwarp();
    const bool is_complete = *counter == 32 && __reduce_add_sync(~0u, v) == sum;
    __syncwarp();
    *y.at(lane) = is_complete && __all_sync(~0u, true) ? sum + of_pair : -1;
  }
};

// y [n] = x [n], but one element too far.
template <class Task>
struct too_far {
  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto y = task.template operand<1>();
    if (task.thread == 0) *y.at(1 << 28) = *x.at(0);
  }
};

// y [0] = 5 / 0, which is undefined.
template <class Task>
struct divide_by_zero {
  ETC_DEVICE static void run(const Task& task) {
    const auto y = task.template operand<1>();
    if (task.thread == 0) *y.at(0) = 5 / (y.size[0] - 4);
  }
};

// Local variables of 1 MB, which are not inlined into a function of other bodies.
template <class Task>
struct overflow_stack {
  __attribute__((noinline)) static void run(const Task& task) {
    const auto y = task.template operand<1>();
    volatile i32 large[1 << 18];
    large[task.thread] = 1;
    if (task.thread == 0) *y.at(0) = large[0];
  }
};

template <class Task>
struct trap {
  ETC_DEVICE static void run(const Task& task) {
    if (task.thread == 0) __builtin_trap();
  }
};

template <class Task>
struct loop_in_registers {
  ETC_DEVICE static void run(const Task& task) {
    if (task.thread != 0) return;
    float v = float(*task.template operand<0>().at(0)) + 1;
    while (v > 0) v = v * 0.99f + 1;
    *task.template operand<1>().at(0) = i32(v);
  }
};

// y [0] = 1 once x [0] has changed.
template <class Task>
struct loop_that_polls {
  ETC_DEVICE static void run(const Task& task) {
    if (task.thread != 0) return;
    const volatile i32* const x = task.template operand<0>().at(0);
    while (*x == 0) {
    }
    *task.template operand<1>().at(0) = 1;
  }
};

// y [0] = elements of x, by all warps at once.
template <class Task>
struct race {
  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto y = task.template operand<1>();
    if (task.thread % 32 == 0) *y.at(0) = *x.at(task.thread);
  }
};

// A barrier that one thread does not reach.
template <class Task>
struct deadlock {
  ETC_DEVICE static void run(const Task& task) {
    if (task.thread > 0) task.sync();
  }
};

// x [n] is an input.
template <class Task>
struct write_input {
  ETC_DEVICE static void run(const Task& task) {
    *task.template operand<0>().at(task.thread) = 0;
  }
};

// Zeros far after the end of y.
template <class Task>
struct loop_too_far {
  ETC_DEVICE static void run(const Task& task) {
    const auto y = task.template operand<1>();
    if (task.thread > 0) return;
    for (i32 n = 1 << 28; n < (1 << 28) + 400; ++n) *y.at(n) = 0;
  }
};

// x [n] is an input.
template <class Task>
struct loop_writes_input {
  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    if (task.thread > 0) return;
    for (i32 n = 0; n < x.size[0]; ++n) *x.at(n) = n;
  }
};

// Copies of four elements: each thread's from x to the same place of y.
template <class Task>
struct vector_race {
  ETC_DEVICE static void run(const Task& task) {
    const int4* const x = reinterpret_cast<const int4*>(task.template operand<0>().at(0));
    int4* const y = reinterpret_cast<int4*>(task.template operand<1>().at(0));
    if (task.thread % 32 == 0) *y = x[task.thread / 32];
  }
};

// A copy to a place far after y.
template <class Task>
struct vector_too_far {
  ETC_DEVICE static void run(const Task& task) {
    const int4* const x = reinterpret_cast<const int4*>(task.template operand<0>().at(0));
    int4* const y = reinterpret_cast<int4*>(task.template operand<1>().at(0));
    if (task.thread == 0) y[1 << 26] = x[0];
  }
};

// A copy within x, an input.
template <class Task>
struct vector_writes_input {
  ETC_DEVICE static void run(const Task& task) {
    int4* const x = reinterpret_cast<int4*>(task.template operand<0>().at(0));
    if (task.thread == 0) x[0] = x[1];
  }
};

// A copy of two elements to an address that is a multiple of 4 only.
template <class Task>
struct vector_unaligned {
  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto y = task.template operand<1>();
    if (task.thread > 0) return;
    *reinterpret_cast<int2*>(y.at(1)) = *reinterpret_cast<const int2*>(x.at(0));
  }
};

// y [0] = x [0], and nothing else of y.
template <class Task>
struct write_first {
  ETC_DEVICE static void run(const Task& task) {
    const auto y = task.template operand<1>();
    if (task.thread == 0) *y.at(0) = *task.template operand<0>().at(0);
  }
};

// The second of two boxes is read out of the bounds of shared memory.
template <class Task>
struct wgmma_too_far {
  ETC_DEVICE static void run(const Task&) {
    float d[4] = {};
    const u32 addresses[] = {16384, 262000};
    ptx::wgmma_fence();
    for (const u32 address : addresses) {
      const u64 at = ptx::matrix_descriptor(address / 16);
      ptx::wgmma_box<false, 8>(d, at, at, 1);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }
};

}  // namespace etc

// Writes far after y, into memory of the emulator: at the place of another thread's stack.
template <class Task>
struct write_stacks {
  ETC_DEVICE static void run(const Task& task) {
    int local = 0;
    int* volatile own = &local;
    if (task.thread == 0) own[2 << 20] = 1;
  }
};
