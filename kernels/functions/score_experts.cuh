// The router of a mixture of experts: the logits of 32 tokens for at most 32 experts. Split-K over
// the warps of a worker; their partial sums are added in a fixed order.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct score_experts {
  static constexpr int kTokens = 32, kGroup = 32;
  static constexpr int kWarps = Task::threads / 32, kSlots = kWarps / 2;
  static_assert(kSlots * kTokens * kGroup * 4 <= Shared::kScratchBytes);
  template <int kBlocks>
  using Part = float[2][kBlocks][4];  // of a thread: fragments of 16 tokens x 8 experts

  ETC_DEVICE static void run(const Task& task) {
    run(task, [] { return true; });
  }
  // ready(): x is there. The first weights are loaded before.
  template <class Ready>
  ETC_DEVICE static void run(const Task& task, Ready ready) {
    const i32 experts = num_experts(task.template operand<1>());
    if (experts <= 8) return score<1>(task, ready);
    // NOTE: of up to 32 experts, 9 to 16 are scored by the code for 32: absent rows load the last
    // one again, from L1.
    if constexpr (Task::kMostScored > 8) score<(Task::kMostScored > 16 ? 4 : 2)>(task, ready);
  }

 private:
  // The last two axes are experts and columns.
  template <class Router>
  ETC_DEVICE static i32 num_experts(const Router& router) {
    return router.size[Router::kRank - 2];
  }

  // Scores kBlocks x 8 experts.
  template <int kBlocks, class Ready>
  ETC_DEVICE static void score(const Task& task, Ready ready) {
    const i32 warp = task.thread / 32;
    float* slot = reinterpret_cast<float*>(task.scratch) + warp % kSlots * (kTokens * kGroup);
    Part<kBlocks> d = {};
    if (!multiply<kBlocks>(task, ready, d)) return;
    if (warp >= kSlots) each(task, slot, d, [](float2& sum, float x, float y) { sum = {x, y}; });
    task.sync();
    if (warp < kSlots) {
      each(task, slot, d, [](float2& sum, float x, float y) { sum = {sum.x + x, sum.y + y}; });
    }
    task.sync();
    store(task);
  }

  // NOTE: a dot product does not depend on the order of k. Each thread loads eight adjacent
  // elements of k and passes them to two mma instructions, in an order that is the same for both
  // operands.
  template <int kBlocks, class Ready>
  ETC_DEVICE static bool multiply(const Task& task, Ready ready, Part<kBlocks>& d) {
    constexpr int kAhead = kBlocks == 1 ? 4 : 2;  // slices of k whose loads are in flight
    const auto x = task.template operand<0>();
    const auto router = task.template operand<1>();
    const i32 thread = i32(ptx::thread()), g = thread % 32 / 4, in_four = thread % 4;
    const i32 depth = x.size[1];
    const u64 first_x = u64(x.at()), first_w = u64(router.at());
    u32 at_x[4], at_w[kBlocks];  // bytes from the first row to this thread's
#pragma unroll
    for (int m = 0; m < 4; ++m) at_x[m] = u32(minimum(g + m * 8, x.size[0] - 1) * depth) * 2;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      at_w[n] = u32(minimum(g + n * 8, num_experts(router) - 1) * depth) * 2;
    }
    const i32 own_k = thread / 32 * 32 + in_four * 8;  // in each slice of k
    uint4 a[kAhead][4], b[kAhead][kBlocks];
    const auto fetch_x = [&](i32 slice, uint4 (&rows)[4]) {
      const i32 k = slice * (kWarps * 32) + own_k;
#pragma unroll
      for (int m = 0; m < 4; ++m) rows[m] = k < depth ? load(first_x + at_x[m] + k * 2) : uint4{};
    };
    const auto fetch_w = [&](i32 slice, uint4 (&weights)[kBlocks]) {
      const i32 k = slice * (kWarps * 32) + own_k;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        weights[n] = k < depth ? load(first_w + at_w[n] + k * 2) : uint4{};
      }
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch_w(i, b[i]);
    if (!ready()) return false;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch_x(i, a[i]);
    const i32 num_slices = (depth + kWarps * 32 - 1) / (kWarps * 32);
#pragma unroll 1
    for (i32 slice = 0; slice < num_slices; slice += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const uint4 low = a[i][2 * m], high = a[i][2 * m + 1];
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) {
            const uint4 w = b[i][n];
            ptx::mma_16x8x16<Task::kIsHalf>(d[m][n], low.x, high.x, low.y, high.y, w.x, w.y);
            ptx::mma_16x8x16<Task::kIsHalf>(d[m][n], low.z, high.z, low.w, high.w, w.z, w.w);
          }
        }
        fetch_x(slice + kAhead + i, a[i]);
        fetch_w(slice + kAhead + i, b[i]);
      }
    }
    return true;
  }
  ETC_DEVICE static uint4 load(u64 address) {
    return *reinterpret_cast<const uint4*>(address);
  }

  // The index of a logit in a slot; groups of four stay together.
  ETC_DEVICE static i32 place(i32 token, i32 expert) {
    return token * kGroup + (expert + (token & 3) * 8) % kGroup;
  }
  template <int kBlocks, class F>
  ETC_DEVICE static void each(
      const Task& task, float* slot, const float (&d)[2][kBlocks][4], F f) {
    const i32 thread = i32(ptx::thread()), g = thread % 32 / 4, in_four = thread % 4;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const float* pair = d[m / 2][n] + m % 2 * 2;
        f(*reinterpret_cast<float2*>(slot + place(g + m * 8, n * 8 + in_four * 2)), pair[0],
            pair[1]);
      }
    }
  }

  ETC_DEVICE static void store(const Task& task) {
    const auto logits = task.template operand<2>();
    const float* slots = reinterpret_cast<const float*>(task.scratch);
    for (i32 i = task.thread * 4; i < kTokens * kGroup; i += Task::threads * 4) {
      const i32 token = i / kGroup, expert = i % kGroup;
      float4 sum = {};
      for (i32 s = 0; s < kSlots; ++s) {
        const float4 values = *reinterpret_cast<const float4*>(
            slots + s * (kTokens * kGroup) + place(token, expert));
        sum = make_float4(sum.x + values.x, sum.y + values.y, sum.z + values.z, sum.w + values.w);
      }
      if (token < logits.size[0] && expert < logits.size[1]) {
        *reinterpret_cast<float4*>(logits.at(token, expert)) = sum;
      }
    }
  }
};

}  // namespace etc
