// The multiplications of wgmma. Part of run.cpp, which is optimized more than a program.
#pragma once
#include "memory.h"

BEGIN_UNTRACKED

namespace emulation {

typedef float Four __attribute__((vector_size(16), aligned(4)));

// The address of an element of an operand: in 128-byte rows along k, or along the other axis if it
// is KN; groups of eight rows are contiguous.
static uint32_t place_of(uint64_t descriptor, uint32_t row, uint32_t k, bool is_kn) {
  const auto field = [&](uint32_t bit) { return uint32_t(descriptor >> bit & 0x3fff) << 4; };
  const uint32_t first = field(0), apart = field(16), eight_rows = field(32);
  const uint32_t of_kn =
      first + row / 64 * apart + k / 8 * eight_rows + k % 8 * 128 + row % 64 * 2;
  const uint32_t of_nk = first + row / 8 * eight_rows + row % 8 * 128 + k * 2;
  return swizzled(is_kn ? of_kn : of_nk);
}
// 16 elements of a row.
static void read_row(uint16_t* to, uint64_t descriptor, uint32_t row, bool is_kn) {
  for (uint32_t k = 0; is_kn && k < 16; ++k) {
    __builtin_memcpy(to + k, at(place_of(descriptor, row, k, true), 2, 2), 2);
  }
  for (uint32_t k = 0; !is_kn && k < 16; k += 8) {  // adjacent in memory
    __builtin_memcpy(to + k, at(place_of(descriptor, row, k, false), 16, 16), 16);
  }
}
static void widen(float (&to)[32], const uint16_t (&from)[32], bool is_half) {
  for (uint32_t i = 0; !is_half && i < 32; ++i) {
    const uint32_t bits = uint32_t(from[i]) << 16;
    __builtin_memcpy(to + i, &bits, 4);
  }
  for (uint32_t i = 0; is_half && i < 32; ++i) {
    const uint32_t size = uint32_t(from[i] & 0x7fff) << 13, sign = uint32_t(from[i] & 0x8000) << 16;
    float number;
    __builtin_memcpy(&number, &size, 4);
    number *= 0x1p112f;  // the difference of the exponents
    uint32_t bits;
    __builtin_memcpy(&bits, &number, 4);
    bits = sign | (size >= 0x7c00u << 13 ? size | 0x7f800000 : bits);  // infinite, or not a number
    __builtin_memcpy(to + i, &bits, 4);
  }
}
// 32 codes of e4m3.
static void widen_codes(float (&to)[32], const uint16_t (&from)[16]) {
  uint8_t codes[32];
  memcpy(codes, from, sizeof codes);
  for (uint32_t i = 0; i < 32; ++i) {
    const uint32_t size = uint32_t(codes[i] & 0x7f) << 20, sign = uint32_t(codes[i] & 0x80) << 24;
    float number;
    __builtin_memcpy(&number, &size, 4);
    number *= 0x1p120f;  // the difference of the exponents
    uint32_t bits;
    __builtin_memcpy(&bits, &number, 4);
    bits = sign | ((codes[i] & 0x7f) == 0x7f ? 0x7fc00000 : bits);  // not a number
    __builtin_memcpy(to + i, &bits, 4);
  }
}
// A warp reads 16 rows of a, from `first` on, and all of b, when it waits for the wgmma.
// NOTE: each of the four warps checks a different quarter of b, which suffices to detect races.
static void check_operands(const WgmmaOp& p, uint32_t first) {
  Worker& worker = *own->worker;
  const uint32_t warp = own->id / 32, count = ++worker.warps[warp].read;
  const Access read{&p.known, p.known.wgmmas(), count, kAsync, false};
  for (uint32_t i = 0; i < 32 && p.registers == nullptr; ++i) {  // eight elements each
    const uint32_t row = first + (p.a_is_kn ? i / 16 * 8 : i / 2);
    const uint32_t k = p.a_is_kn ? i % 16 : i % 2 * 8;
    if (row < uint32_t(p.rows)) access_shared(worker, place_of(p.a, row, k, p.a_is_kn), 16, read);
  }
  for (uint32_t i = warp % 4; i < uint32_t(p.columns) * 2; i += 4) {  // eight elements each
    const uint32_t row = p.b_is_kn ? i / 16 * 8 : i / 2, k = p.b_is_kn ? i % 16 : i % 2 * 8;
    access_shared(worker, place_of(p.b, row, k, p.b_is_kn), 16, read);
  }
}
// Of K-major codes: 32 k.
static void multiply_codes(const WgmmaOp& p, uint32_t row) {
  uint16_t bits[16];
  float a[2][32], b[2][32];
  for (uint32_t half = 0; half < 2; ++half) {
    read_row(bits, p.a, row + half * 8, false), widen_codes(a[half], bits);
  }
  Four rows[32];
  for (uint32_t k = 0; k < 32; ++k) rows[k] = Four{a[0][k], a[0][k], a[1][k], a[1][k]};
  Four* const sums = reinterpret_cast<Four*>(p.sums);  // of two rows and two columns
  for (uint32_t i = 0; i < uint32_t(p.columns) / 8; ++i) {
    for (uint32_t n = 0; n < 2; ++n) {
      read_row(bits, p.b, i * 8 + own->id % 4 * 2 + n, false), widen_codes(b[n], bits);
    }
    Four sum = p.adds ? sums[i] : Four{};
    for (uint32_t k = 0; k < 32; ++k) sum += rows[k] * Four{b[0][k], b[1][k], b[0][k], b[1][k]};
    sums[i] = sum;
  }
}
void multiply(const WgmmaOp& p) {
  const uint32_t thread = own->id % 128, row = thread / 32 * 16 + thread % 32 / 4;
  if (p.are_codes) {
    if (thread % 32 == 0) check_operands(p, row);
    return multiply_codes(p, row);
  }
  uint16_t bits[32];  // of two rows
  float a[32], b[32];
  if (p.registers != nullptr) {
    if (memcmp(p.registers, p.held, sizeof p.held) != 0) {
      fail("registers of a wgmma are written before it has ended");
    }
    memcpy(bits, p.a_rows, sizeof bits);
  }
  for (uint32_t half = 0; half < 2 && p.registers == nullptr; ++half) {
    const bool is_known = row + half * 8 < uint32_t(p.rows);
    if (is_known) read_row(bits + half * 16, p.a, row + half * 8, p.a_is_kn);
    else memset(bits + half * 16, 0xff, 32);  // not a number
  }
  widen(a, bits, p.is_half);
  if (thread % 32 == 0) check_operands(p, row);
  Four* const sums = reinterpret_cast<Four*>(p.sums);  // of two rows and two columns
  for (uint32_t i = 0; i < uint32_t(p.columns) / 8; ++i) {
    const uint32_t column = i * 8 + thread % 4 * 2;
    if (p.b_is_kn) {  // two columns are adjacent in memory
      for (uint32_t k = 0; k < 16; ++k) {
        const uint8_t* const from = at(place_of(p.b, column, k, true), 4, 4);
        __builtin_memcpy(bits + k, from, 2), __builtin_memcpy(bits + 16 + k, from + 2, 2);
      }
    } else {
      read_row(bits, p.b, column, false), read_row(bits + 16, p.b, column + 1, false);
    }
    widen(b, bits, p.is_half);
    Four sum = p.adds ? sums[i] : Four{};
    for (uint32_t k = 0; k < 16; ++k) {
      sum += Four{a[k], a[k], a[16 + k], a[16 + k]} * Four{b[k], b[16 + k], b[k], b[16 + k]};
    }
    sums[i] = sum;
  }
}

}  // namespace emulation

END_UNTRACKED
