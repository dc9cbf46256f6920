#pragma once
#include "common/types.cuh"

BEGIN_UNTRACKED_CALLS

namespace etc::ptx {

inline emulation::Access own_access(bool writes) {
  return access_of(emulation::own->known, emulation::kPlain, writes);
}
template <class T>
T load(u64 address) {
  T v;
  const u8* const from = emulation::global(address, sizeof v, sizeof v);
  emulation::access_global(from, sizeof v, own_access(false));
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
template <class T>
void store(u64 address, T v) {
  u8* const to = emulation::global(address, sizeof v, sizeof v);
  emulation::access_global(to, sizeof v, own_access(true));
  __builtin_memcpy(to, &v, sizeof v);
}
template <class T>
T load_shared_as(u32 address) {
  emulation::may_yield();
  T v;
  const u8* const from = emulation::at(address, sizeof v, sizeof v);
  emulation::access_shared(*emulation::own->worker, address, sizeof v, own_access(false));
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

inline u64 global_timer() {
  emulation::poll();
  return emulation::now();
}
inline void nanosleep(u32) { emulation::poll(); }

constexpr bool kReads = true, kWrites = true, kAdds = true, kAcquires = true, kReleases = true;

inline u32 load_word(u64 address, bool system, bool acquires) {
  emulation::poll();
  return emulation::change_word(
      address, {system, kReads, !kWrites, !kAdds, acquires}, [](u32 v) { return v; });
}
template <bool kSystem>
u32 load_acquire(u64 address) {
  return load_word(address, kSystem, kAcquires);
}
inline u64 load_acquire_u64(u64 address) { return load_word(address, true, kAcquires); }
inline u32 load_relaxed(u64 address) { return load_word(address, true, !kAcquires); }
inline void store_relaxed(u64 address, u32 v) {
  emulation::change_word(address, {true, !kReads, kWrites}, [&](u32) { return v; });
}
inline void store_release(u64 address, u32 v) {
  emulation::yield();
  emulation::change_word(
      address, {true, !kReads, kWrites, !kAdds, !kAcquires, kReleases}, [&](u32) { return v; });
}
// NOTE: not tracked: they order no other accesses.
struct TwoWords {
  u64 first, second;
};
inline TwoWords load_words(u64 address) {
  const u8* const from = emulation::global(address, 16, 16);
  TwoWords v;
  emulation::poll();
  __builtin_memcpy(&v.first, from, 8);
  emulation::poll();
  __builtin_memcpy(&v.second, from + 8, 8);
  return v;
}
inline void store_words(u64 address, TwoWords v) {
  u8* const to = emulation::global(address, 16, 16);
  __builtin_memcpy(to, &v.first, 8);
  emulation::may_yield();
  __builtin_memcpy(to + 8, &v.second, 8);
  emulation::may_yield();
}
inline u32 add(u64 address, u32 v, const emulation::Atomic& how) {
  return emulation::change_word(address, how, [&](u32 before) { return before + v; });
}
template <bool kSystem>
void add_relaxed(u64 address, u32 v) {
  add(address, v, {kSystem, !kReads, kWrites, kAdds});
}
template <bool kSystem>
u32 fetch_add(u64 address, u32 v) {
  return add(address, v, {kSystem, kReads, kWrites, kAdds});
}
template <bool kSystem>
u32 fetch_add_acquire(u64 address, u32 v) {
  return add(address, v, {kSystem, kReads, kWrites, kAdds, kAcquires});
}
inline u32 fetch_add_acq_rel(u64 address, u32 v) {
  return add(address, v, {false, kReads, kWrites, kAdds, kAcquires, kReleases});
}
template <bool kSystem>
u32 fetch_or(u64 address, u32 v) {
  return emulation::change_word(
      address, {kSystem, kReads, kWrites, kAdds}, [&](u32 before) { return before | v; });
}
inline u32 count_up(u64 address) { return fetch_add<false>(address, 1); }
template <bool kSystem>
void fence_acq_rel() {
  emulation::may_yield();
  fence_acquire_release(emulation::own->known, emulation::own->fences, kSystem);
}
inline void fence_proxy_async_global() { emulation::own->known.fence(emulation::kGlobal); }
inline void fence_proxy_async_shared() { emulation::own->known.fence(emulation::kShared); }

inline uint4 load16_l2(u64 address) { return load<uint4>(address); }
inline uint4 load16_last(u64 address) { return load<uint4>(address); }
inline uint4 load16_once_if(bool wanted, u64 address) {
  if (wanted && emulation::is_written(address)) {
    emulation::fail("memory that the program writes is read through the non-coherent cache");
  }
  return wanted ? load<uint4>(address) : uint4{};
}
inline u32 load4_l2(u64 address) { return load<u32>(address); }
inline uint4 load16_l2_if(bool wanted, u64 address) {
  return wanted ? load<uint4>(address) : uint4{};
}
inline u32 load4_l2_if(bool wanted, u64 address) { return wanted ? load<u32>(address) : 0; }
template <u32 kBytes>
void load_l2_into(u32& v, bool wanted, u64 address) {
  if (wanted) v = kBytes == 2 ? load<u16>(address) : load<u32>(address);
}
inline uint2 load8_l2_if(bool wanted, u64 address) {
  return wanted ? load<uint2>(address) : uint2{};
}
inline void store16(u64 address, uint4 v) { store(address, v); }
inline void store8(u64 address, u32 low, u32 high) { store(address, uint2{low, high}); }
inline void store4(u64 address, u32 v) { store(address, v); }
inline void prefetch_l2(u64, u32) {}

inline void copy16_async(u32 shared, u64 address, u32 bytes) {
  emulation::Thread& self = *emulation::own;
  if (self.copied == sizeof self.copies / sizeof *self.copies) {
    emulation::fail("more than 64 asynchronous copies of one thread");
  }
  if (bytes > 16) emulation::fail("a copy of more than 16 bytes");
  const u8* const from = bytes == 0 ? nullptr : emulation::global(address, bytes, 16);
  u8* const to = emulation::at(shared, 16, 16);
  self.copies[self.copied++] = {to, from, bytes, shared, self.known.issue()};
}
inline void mbarrier_arrive_copied(u32 barrier) {
  emulation::Thread& self = *emulation::own;
  emulation::AsyncOp what{emulation::AsyncOp::kCopies, self.worker};
  what.barrier = barrier, what.count = self.copied;
  what.copies = static_cast<emulation::Copy*>(malloc(sizeof self.copies));
  memcpy(what.copies, self.copies, sizeof self.copies);
  self.copied = 0;
  emulation::issue_async(what);
}

inline void store_shared(u32 address, u32 v) {
  u8* const to = emulation::at(address, sizeof v, sizeof v);
  emulation::access_shared(*emulation::own->worker, address, sizeof v, own_access(true));
  __builtin_memcpy(to, &v, sizeof v);
}
inline void store_shared8(u32 address, u32 low, u32 high) {
  const uint2 v{low, high};
  u8* const to = emulation::at(address, sizeof v, sizeof v);
  emulation::access_shared(*emulation::own->worker, address, sizeof v, own_access(true));
  __builtin_memcpy(to, &v, sizeof v);
}
inline void store_shared16(u32 address, uint4 v) {
  u8* const to = emulation::at(address, sizeof v, sizeof v);
  emulation::access_shared(*emulation::own->worker, address, sizeof v, own_access(true));
  memcpy(to, &v, sizeof v);
}
inline uint4 load_shared16(u32 address) { return load_shared_as<uint4>(address); }
inline uint2 load_shared8(u32 address) { return load_shared_as<uint2>(address); }
inline u32 load_shared(u32 address) { return load_shared_as<u32>(address); }
inline u32 load_shared2(u32 address) { return load_shared_as<u16>(address); }
inline u8* shared_memory() { return emulation::own->worker->shared; }
inline u32 shared_address(const void* p) {
  return u32(static_cast<const u8*>(p) - emulation::own->worker->shared);
}

}  // namespace etc::ptx

END_UNTRACKED_CALLS
