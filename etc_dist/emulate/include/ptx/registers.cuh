#pragma once

namespace etc::ptx {

template <int kRegisters>
void registers_grow() {}
template <int kRegisters>
void registers_shrink() {}

}  // namespace etc::ptx
