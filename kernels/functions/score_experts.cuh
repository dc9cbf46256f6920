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
  ETC_DEVICE static void run(const Task& task) {
    run(task, [] { return true; });
  }
  // ready(): x is there. The first weights are loaded before.
  template <class Ready>
  ETC_DEVICE static void run(const Task& task, Ready ready) {
    const i32 experts = num_experts(task.template operand<1>());
    if constexpr (Task::kMostScored == 8) {
      if (task.template operand<0>().size[0] <= 8) return score<1, 1>(task, ready);
    }
    if (experts <= 8) return score<1, 4>(task, ready);
    // NOTE: of up to 32 experts, 9 to 16 are scored by the code for 32: absent rows load the last
    // one again, from L1.
    if constexpr (Task::kMostScored > 8) score<(Task::kMostScored > 16 ? 4 : 2), 4>(task, ready);
  }

 private:
  // The last two axes are experts and columns.
  template <class Router>
  ETC_DEVICE static i32 num_experts(const Router& router) {
    return router.size[Router::kRank - 2];
  }

  // Of a thread, for kEights x 8 tokens and kBlocks x 8 experts: fragments of 16 x 8.
  template <int kBlocks, int kEights>
  using Part = float[(kEights + 1) / 2][kBlocks][4];

  template <int kBlocks, int kEights, class Ready>
  ETC_DEVICE static void score(const Task& task, Ready ready) {
    const i32 warp = task.thread / 32;
    float* slot = reinterpret_cast<float*>(task.scratch) + warp % kSlots * (kTokens * kGroup);
    Part<kBlocks, kEights> d = {};
    if (!multiply(task, ready, Fragments<kBlocks, kEights>(task), d)) return;
    const auto each_sum = [&](auto f) { each<kBlocks, kEights>(slot, d, f); };
    if (warp >= kSlots) each_sum([](float2& sum, float x, float y) { sum = {x, y}; });
    task.sync();
    if (warp < kSlots) {
      each_sum([](float2& sum, float x, float y) { sum = {sum.x + x, sum.y + y}; });
    }
    task.sync();
    store(task);
  }

  // The fragments of a thread. NOTE: a dot product does not depend on the order of k. Each thread
  // loads eight adjacent elements of k and passes them to two mma instructions, in an order that is
  // the same for both operands.
  template <int kBlocks, int kEights>
  struct Fragments {
    using Rows = uint4[kEights];
    using Weights = uint4[kBlocks];
    u64 first_x, first_w;
    u32 at_x[kEights], at_w[kBlocks];  // bytes from the first row to this thread's
    i32 depth, own_k;                  // in each slice of k

    ETC_DEVICE explicit Fragments(const Task& task) {
      const auto x = task.template operand<0>();
      const auto router = task.template operand<1>();
      const i32 thread = i32(ptx::thread()), g = thread % 32 / 4, in_four = thread % 4;
      depth = x.size[1], own_k = thread / 32 * 32 + in_four * 8;
      first_x = u64(x.at()), first_w = u64(router.at());
#pragma unroll
      for (int m = 0; m < kEights; ++m) {
        at_x[m] = u32(minimum(g + m * 8, x.size[0] - 1) * depth) * 2;
      }
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        at_w[n] = u32(minimum(g + n * 8, num_experts(router) - 1) * depth) * 2;
      }
    }
    ETC_DEVICE i32 num_slices() const { return (depth + kWarps * 32 - 1) / (kWarps * 32); }
    ETC_DEVICE void fetch_x(i32 slice, Rows& rows) const { fetch(slice, first_x, at_x, rows); }
    ETC_DEVICE void fetch_w(i32 slice, Weights& weights) const {
      fetch(slice, first_w, at_w, weights);
    }
    ETC_DEVICE static void add(const Rows& a, const Weights& b, Part<kBlocks, kEights>& d) {
#pragma unroll
      for (int m = 0; m < kEights; m += 2) {
        const uint4 low = a[m], high = kEights > 1 ? a[(m + 1) % kEights] : uint4{};
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const uint4 w = b[n];
          float (&sums)[4] = d[m / 2][n];
          ptx::mma_16x8x16<Task::kIsHalf>(sums, low.x, high.x, low.y, high.y, w.x, w.y);
          ptx::mma_16x8x16<Task::kIsHalf>(sums, low.z, high.z, low.w, high.w, w.z, w.w);
        }
      }
    }

   private:
    template <int kCount>
    ETC_DEVICE void fetch(
        i32 slice, u64 first, const u32 (&offsets)[kCount], uint4 (&vectors)[kCount]) const {
      const i32 k = slice * (kWarps * 32) + own_k;
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        vectors[n] = k < depth ? load(first + offsets[n] + k * 2) : uint4{};
      }
    }
  };

  template <int kBlocks, int kEights, class Ready>
  ETC_DEVICE static bool multiply(
      const Task& task, Ready ready, const Fragments<kBlocks, kEights>& fragments,
      Part<kBlocks, kEights>& d) {
    constexpr int kAhead = kBlocks == 1 ? 4 : 2;  // slices of k whose loads are in flight
    uint4 a[kAhead][kEights], b[kAhead][kBlocks];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fragments.fetch_w(i, b[i]);
    if (!ready()) return false;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fragments.fetch_x(i, a[i]);
    const i32 num_slices = fragments.num_slices();
#pragma unroll 1
    for (i32 slice = 0; slice < num_slices; slice += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        fragments.add(a[i], b[i], d);
        fragments.fetch_x(slice + kAhead + i, a[i]);
        fragments.fetch_w(slice + kAhead + i, b[i]);
      }
    }
    return true;
  }
  // Few tokens. NOTE: a step of a decoder waits for them: of 2048 columns, all weights are loaded
  // before x is there, and there is little code.
  template <class Ready>
  ETC_DEVICE static bool multiply(
      const Task& task, Ready ready, const Fragments<1, 1>& fragments, Part<1, 1>& d) {
    constexpr int kTogether = 8;
    const i32 num_slices = fragments.num_slices();
#pragma unroll 1
    for (i32 slice = 0; slice < num_slices; slice += kTogether) {
      uint4 a[kTogether][1], b[kTogether][1];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) fragments.fetch_w(slice + i, b[i]);
      if (slice == 0 && !ready()) return false;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) fragments.fetch_x(slice + i, a[i]);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) fragments.add(a[i], b[i], d);
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
  template <int kBlocks, int kEights, class F>
  ETC_DEVICE static void each(float* slot, const Part<kBlocks, kEights>& d, F f) {
    const i32 thread = i32(ptx::thread()), g = thread % 32 / 4, in_four = thread % 4;
#pragma unroll
    for (int m = 0; m < kEights; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const float* pair = d[m / 2][n] + m % 2 * 2;
        f(*reinterpret_cast<float2*>(slot + place(g + m * 8, n * 8 + in_four * 2)), pair[0],
            pair[1]);
      }
    }
  }

  // A thread has four logits of a token.
  ETC_DEVICE static void store(const Task& task) {
    static_assert(Task::threads * 4 == kTokens * kGroup);
    const auto logits = task.template operand<2>();
    const float* slots = reinterpret_cast<const float*>(task.scratch);
    const i32 token = task.thread * 4 / kGroup, expert = task.thread * 4 % kGroup;
    if (token >= logits.size[0] || expert >= logits.size[1]) return;
    float4 sum = {};
#pragma unroll
    for (i32 s = 0; s < kSlots; ++s) {
      const float4 values = *reinterpret_cast<const float4*>(
          slots + s * (kTokens * kGroup) + place(token, expert));
      sum = make_float4(sum.x + values.x, sum.y + values.y, sum.z + values.z, sum.w + values.w);
    }
    *reinterpret_cast<float4*>(logits.at(token, expert)) = sum;
  }
};

}  // namespace etc
