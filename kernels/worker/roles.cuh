// Roles: how a device function of the tensor lane divides a task among the warps of a worker.
//
// In Python, DeviceFunction(roles=(...), streams=(...), shared=...) names the roles. A function
// without roles has a body, `Name<Task>::run(task)`, which the 256 compute threads run. A function
// with roles is a struct `template <class Call> struct Name : Roles` with static members:
//
//   role      threads            member; all but size() and stages() return false after an abort
//   prepare   warp 8, one lane   auto prepare(run, c): what size(), data() and load() get in place of
//                                c; load() also gets `event` before `loaded`. With
//                                reads_before_wait=, both run before the last wait is met
//   load      warp 8, one lane   u32 size(run, c)
//                                RingStages stages(run, size)
//                                bool load(run, StageLoader&, c, size, publish, loaded)
//   gather    warps 10 and 11    bool gather(run, StageGatherer&, c, size)
//   compute   warps 0 to 7       using Compute = a struct, see below
//   store     warp 9             bool store(run, compute, c, size, counters, entered, who)
//
//   run       Run<Program>; c: Call::Coord of the task; who: the Waiter of the task
//   size      what the roles need to know of a task, in 31 bits; 0 for a task with nothing to
//             compute. size() runs on one thread, once the waits of the task are met (for a task
//             with streams: earlier), and its result goes to the other roles in the WorkItem.
//   stages()  number and bytes of the ring stages that a task of this size uses
//   load()    calls publish() once, which passes the task to the other roles. Begins each stage in
//             order; calls loaded(n) after the n-th one, counted from 1, but not for those of
//             load_first().
//             With streams=, `bool load_ahead(run, StageLoader&, c, size, n)` begins stage n and
//             loads the streamed operands alone, before the waits are met. While
//             StageLoader::is_begun(), load() takes next_begun() and loads the other operands.
//             `event`, of a function that prepares: is_met() polls the last event, and wait() waits
//             for it; false after an abort. load() must not return before it is met. Until then
//             it may begin as many stages as start_ahead() and has_room_ahead() say.
//   gather()  fills the stages that load() begins with is_gathered = true
//   compute   the object of the function's Compute struct; counters: its Counters of this role
//   store()   notifies. Without the role, the compute threads store the tile, and the worker's
//             loop notifies afterwards.
//   entered   peers that have started, for wait_peers()
//
// Every member of Roles is a default that a function may replace:
//   kVariant     a constant of the call that its Compute receives
//   kUniformStageBytes  the bytes of all stages of the function, where they are known
//   kWritesPeers the compute threads write to peers once all stages are full: load() gets started(),
//                before `loaded`, and calls it before it begins the last stage, or publishes a task
//                without stages. This waits until the peers have started; false after an abort.
//   prefetch_maps(run)  one thread, at the start of a launch, or while a wait is not met: fetches
//                the tensor maps of the loads
//   load_first(run, StageLoader&, c, ready)  for a launch's first task, which waits for nothing:
//                calls ready() once, and may then begin the task's first stages by
//                StageLoader::begin_first(): as many as fit in the ring, all of the same bytes,
//                none of them gathered. load() learns their number by take_first() before it
//                begins another one. The launch may be skipped; run.epoch is not known yet.
//   kDataWords   words of the WorkItem that `void data(run, c, size, u32 (&words)[kDataWords])`,
//                on the loading thread, fills for the compute threads
//
// Compute: one piece of code and one object for all calls of a program with the same type.
//   struct Compute {
//     u32 control, buffer;                       // shared-memory addresses; set by the worker
//     static constexpr u32 kControlBytes;        // mbarriers and small values at `control`
//     struct Counters;                           // zero at first; one for each role
//     void init() const;                         // one thread: initializes the mbarriers
//     template <class Calls>                     // the calls of the tensor lane
//     bool compute(run, StageReader&, const Work&, Counters&) const;   // 256 threads
//   };
//   compute()      reads and releases every stage of the task, in order, on all eight warps. The
//                  result is alike on all threads of a warpgroup. Work: {size, variant, data}.
//   kWaits         if there is this bool, compute() gets ready() as last argument, which waits for
//                  the task's last event; false after an abort. All threads call it once, before
//                  they return. The bool: whether the task began before that event was met.
//   buffer         Program::kBufferBytes after the ring: the largest `shared=` of the program.
//                  Functions use it in turn; warpgroup w has the half at w * kBufferBytes / 2.
//                  No other warp uses it, and these do not after compute().
//
// Ring stages (worker/stage_ring.cuh) have any multiple of 1024 bytes.
#pragma once
#include "event/wait.cuh"

namespace etc {

enum Role : u32 {
  kLoadRole = 1,
  kGatherRole = 2,
  kComputeRole = 4,
  kStoreRole = 8,
  kPrepareRole = 16,
};
template <class Call>
constexpr bool has_role(Role role) {
  return (Call::kRoles & role) != 0;
}

// The stages of a task, all of the same size.
struct RingStages {
  u32 count, bytes;
};

// What the compute threads receive of a task. `data`: shared address of the words of data(), which
// stay there until compute() returns.
struct Work {
  u32 size, variant, data;
};

struct Roles {
  static constexpr u32 kVariant = 0, kDataWords = 0, kUniformStageBytes = 0;
  static constexpr bool kWritesPeers = false;
  template <class Program>
  ETC_DEVICE static void prefetch_maps(const Run<Program>&) {}
  template <class Program, class Loader, class Coord, class Ready>
  ETC_DEVICE static void load_first(const Run<Program>&, Loader&, const Coord&, Ready ready) {
    ready();
  }
};

}  // namespace etc
