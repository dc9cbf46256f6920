// Integer types and the qualifiers of device functions.
// NOTE: no toolkit header is included anywhere, so that NVRTC alone compiles a program.
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
