// Integers, and what marks a function of the device.
// NOTE: no header of the toolkit is included anywhere: a program compiles with NVRTC alone.
#pragma once

#define ETC_DEVICE __device__ __forceinline__

namespace etc {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

}  // namespace etc
